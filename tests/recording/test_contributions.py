"""Rows by groups of positions, against every layer called once more with the other positions' gradient at zero."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.run.test_run_adam import next_token, sequences
from tests.support import adam
from tests.support.adam import Tiny, adamw, block_of, group_rows, projected
from tests.support.loops import Batch, normal, one_backward_each, seeded, sgd, trained_names
from tests.support.oracles import assert_close
from tests.support.zoo import Text
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.maths.layers import RULES
from backstory.store import RunStore

LEARNED: dict[str, Any] = {"projection": "learned", "rank": 2, "warmup_steps": 2, "curvature_of": "steps"}
PROJECTIONS: dict[str, dict[str, Any]] = {
    "full": {"projection": "full"},
    "random": {"projection": "random", "rank": 2},
    "learned": LEARNED,
}
CAUSES = "Scattered ratios: other groups in one layer than in another. A ratio of 3: the weight was not divided out."


class Odd(nn.Linear):
    """A layer whose rule writes its gradients out."""


def written_out(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
    return {"weight": torch.einsum("bso,bsi->boi", delta, inputs[0]), "bias": delta.sum(1)}


class Mixed(nn.Module):
    """A layer with a rule of its own, a grouped convolution over positions, and a head without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.odd = nn.Embedding(7, 4), Odd(4, 4)
        self.conv, self.head = nn.Conv1d(4, 6, 3, padding=1, groups=2), nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.odd(self.token(tokens)).tanh()
        out: Tensor = self.head(self.conv(h.mT).tanh().mean(2))
        return out


def last_class(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[0][:, -1] % 2, reduction="none")


MODELS: dict[str, Any] = {
    "attention": (Tiny, next_token),
    "tied": (lambda: Tiny(tied=True), next_token),
    "positions for the batch, tied": (lambda: Text("(1, S)", tied=True), next_token),
    "rules that write out": (Mixed, last_class),
}


@pytest.fixture(autouse=True)
def _rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, Odd, RULES[nn.Linear])  # put back afterwards
    backstory.register(Odd, written_out)


@pytest.mark.parametrize("K", [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("projection", PROJECTIONS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_each_group_at_each_layers_own_output(
    name: str, projection: str, K: int, tmp_path: Path
) -> None:
    """Sequences have 5 positions: 2 and 3 do not divide it."""
    make, losses = MODELS[name]
    model = seeded(make())
    settings = {**PROJECTIONS[projection], "curvature": f"empirical/{K}"}
    seen = adam.record(tmp_path / "run", model, adamw(model), 4, groups=K, tokens=4, micro=3, max_norm=0.05,
                       losses=losses, batch=sequences, **settings)  # fmt: skip
    actual = block_of(tmp_path / "run")
    assert actual.curvature is not None
    assert actual.hdot is not None
    assert actual.rows is not None
    scale = [torch.ones(()) if projection == "full" else s.half for s in seen]
    pieces = [projected(s.pieces * x, model, tmp_path / "run") for s, x in zip(seen, scale, strict=True)]
    assert_close(actual.curvature.flatten(0, 1), torch.cat(pieces).flatten(0, 1), 1e-9, CAUSES)
    whole = [projected(s.rows * x, model, tmp_path / "run") for s, x in zip(seen, scale, strict=True)]
    assert_close(actual.rows, torch.cat(whole), 1e-9, "the gradient is the sum of its groups")
    if projection == "full":
        products = [(s.pieces @ s.whole, s.rows @ s.whole) for s in seen]
    else:
        run = (model, tmp_path / "run")
        products = [(adam.met(s.pieces, s, t, *run), adam.met(s.rows, s, t, *run)) for t, s in enumerate(seen)]
    assert_close(actual.hdot, torch.cat([h for h, _ in products]), 1e-9, "⟨h, ∇L⟩ in unscaled coordinates")
    assert_close(actual.gdot, torch.cat([g for _, g in products]), 1e-9)
    store = RunStore.open(tmp_path / "run")
    assert (store.steps().clip < 1).all()
    assert store.split
    assert actual.kappa is not None
    assert_close(actual.kappa, torch.full((12, K), 4 / 3, dtype=torch.float64), 1e-14, "w × terms")


def test_without_clipping_products_are_those_of_the_kept_coordinates(tmp_path: Path) -> None:
    model = seeded(Tiny())
    settings = {**LEARNED, "curvature": "empirical/3", "tokens": 4, "losses": next_token, "batch": sequences}
    adam.record(tmp_path / "run", model, adamw(model), 4, **settings)
    actual = block_of(tmp_path / "run")
    assert actual.rows is not None
    assert actual.curvature is not None
    assert actual.hdot is not None
    for t in range(4):
        at = slice(3 * t, 3 * t + 3)
        assert_close(actual.hdot[at], actual.curvature[at] @ actual.rows[at].mean(0), 1e-10)


LENGTHS = [5, 2, 1, 4]


def padded(model: nn.Module, batch: Batch) -> Tensor:
    """Σ over a sample's own tokens; ignored labels are −100."""
    tokens, labels = batch
    return F.cross_entropy(model(tokens).mT, labels, ignore_index=-100, reduction="none").sum(1)


def padded_batch() -> Batch:
    (tokens,) = sequences([1, 2, 3, 4])
    labels = torch.where(torch.arange(5) < torch.tensor(LENGTHS)[:, None], tokens.roll(-1, 1), -100)
    return tokens, labels


@pytest.mark.parametrize("micro", [1, 2, 4])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_padded_sequences_of_unequal_lengths_under_a_token_mean(projection: str, micro: int, tmp_path: Path) -> None:
    """Each sequence has the weight 1/(tokens of the whole step), however the step is cut; and "auto" takes rows apart."""
    model = seeded(Tiny())
    optimizer = adamw(model)
    tokens, labels = padded_batch()
    names = trained_names(model)
    pieces = group_rows(model, (tokens, labels), padded, names, 6)
    rows = one_backward_each(model, (tokens, labels), padded, names)
    settings = {"loss_reduction": "token-mean", "encoding": "float64", **PROJECTIONS[projection]}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec, rec.step() as s:
        for part in torch.arange(4).chunk(micro):
            s.batch(part, tokens=(labels[part] != -100).sum(1))
            (padded(model, (tokens[part], labels[part])).sum() / sum(LENGTHS)).backward()
        optimizer.step()
    actual = block_of(tmp_path / "run")
    half = torch.ones(()) if projection == "full" else adam.second_moments(model, optimizer)[0]
    assert actual.curvature is not None
    assert actual.rows is not None
    assert actual.kappa is not None
    assert backstory.open(tmp_path / "run").config["settings"]["curvature"] == "empirical/6"
    expected = projected(pieces * half, model, tmp_path / "run")
    assert_close(actual.curvature.flatten(0, 1), expected.flatten(0, 1), 1e-9, CAUSES)
    assert_close(actual.rows, projected(rows * half, model, tmp_path / "run"), 1e-9)
    assert_close(actual.weight, torch.full((4,), 1 / sum(LENGTHS), dtype=torch.float64), 1e-14)
    assert_close(actual.kappa, torch.full((4, 6), 1 / sum(LENGTHS), dtype=torch.float64), 1e-14)


@pytest.mark.parametrize("how", ["tokens", "mask"])
def test_a_mean_over_a_samples_own_tokens_multiplies_kappa_by_their_number(how: str, tmp_path: Path) -> None:
    model = seeded(Tiny())
    optimizer = adamw(model)
    tokens, labels = padded_batch()
    there, lengths = labels != -100, torch.tensor(LENGTHS, dtype=torch.float64)
    settings: dict[str, Any] = {"curvature": "empirical/3", "projection": "full", "encoding": "float64"}
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec:
        with rec.step() as s:
            s.batch(range(4), tokens=there.sum(1) if how == "tokens" else None)
            if how == "mask":
                s.outputs(model(tokens), "cross-entropy", mask=there, reduction="mean")
            (padded(model, (tokens, labels)) / lengths).mean().backward()
            optimizer.step()
    kappa = block_of(tmp_path / "run").kappa
    assert kappa is not None
    assert_close(kappa, (lengths / 4)[:, None].expand(-1, 3), 1e-14)


@pytest.mark.parametrize(
    ("reduction", "says"),
    [("mean", "loss_reduction='mean' needs the number of terms"), ("token-mean", "needs the token count")],
)
def test_missing_tokens_are_asked_for_before_the_model_moves(reduction: str, says: str, tmp_path: Path) -> None:
    model = seeded(Tiny())
    before, optimizer = model.get_parameter("head.weight").detach().clone(), adamw(model)
    rec = backstory.record(model, optimizer, tmp_path / "run", loss_reduction=reduction, curvature="empirical/3")
    with rec, pytest.raises(UsageError, match=says), rec.step(range(3)):
        next_token(model, sequences([0, 1, 2])).mean().backward()
        optimizer.step()
    assert torch.equal(model.get_parameter("head.weight"), before)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_sampled_rows_taken_apart_leave_the_gradient_whole(
    projection: str, max_norm: float | None, tmp_path: Path
) -> None:
    """Also where a layer's rule writes its gradients out: its positions belong to the curvature rows only."""
    model = seeded(Mixed())
    optimizer, names, seen = adamw(model), trained_names(model), []
    settings = {"loss_reduction": "mean", "encoding": "float64", "curvature": "exact:2/3", **PROJECTIONS[projection]}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        for t in range(4):
            batch = sequences([t, 10 + t, 20 + t])
            rows = one_backward_each(model, batch, last_class, names)
            passes = [group_rows(model, batch, _seeded_by(c), names, 3) for c in range(2)]
            optimizer.zero_grad()
            with rec.step(range(3)) as s:
                out = model(batch[0])
                s.outputs(out, "cross-entropy")
                F.cross_entropy(out, batch[0][:, -1] % 2).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
            half = torch.ones(()).double() if projection == "full" else adam.second_moments(model, optimizer)[0]
            seen.append(adam.Seen(rows, torch.cat(passes, 1), rows.mean(0), half.expand(rows.shape[1]), half))
    actual = block_of(tmp_path / "run")
    assert actual.curvature is not None
    assert actual.rows is not None
    assert actual.hdot is not None
    run = (model, tmp_path / "run")
    assert_close(actual.rows, torch.cat([projected(s.rows * s.half, *run) for s in seen]), 1e-9, CAUSES)
    curved = torch.cat([projected(s.pieces * s.half, *run) for s in seen])
    assert_close(actual.curvature.flatten(0, 1), curved.flatten(0, 1), 1e-9, CAUSES)
    if max_norm is not None:
        assert_close(actual.hdot, torch.cat([adam.met(s.pieces, s, t, *run) for t, s in enumerate(seen)]), 1e-9)
        assert_close(actual.gdot, torch.cat([adam.met(s.rows, s, t, *run) for t, s in enumerate(seen)]), 1e-9)


def _seeded_by(c: int) -> Any:
    """A "loss" whose gradient is √p_c Jᵀ(p − 1_c)."""

    def of(model: nn.Module, batch: Batch) -> Tensor:
        out = model(batch[0])
        p = out.detach().softmax(1)
        seed = p[:, c, None].sqrt() * (p - F.one_hot(torch.tensor(c), 2))
        losses: Tensor = (out * seed).sum(1)
        return losses

    return of


class Square(nn.Linear):
    """A layer on two dimensions of positions whose rule writes its gradients out."""


def test_two_dimensions_of_positions_are_one_row_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that writes out and one that does not see the same groups."""

    def rule(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
        return {"weight": torch.einsum("bsto,bsti->boi", delta, inputs[0]), "bias": delta.sum((1, 2))}

    monkeypatch.setitem(RULES, Square, rule)
    settings: dict[str, Any] = {"curvature": "empirical/3", "projection": "full", "encoding": "float64"}
    actual = []
    for kind in (Square, nn.Linear):
        model = seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), kind(4, 2)))
        optimizer, path = sgd(model), tmp_path / kind.__name__
        with backstory.record(model, optimizer, path, loss_reduction="mean", **settings) as rec, rec.step() as s:
            s.batch(range(3), tokens=[10] * 3)
            model(normal(3, 2, 5, 3, seed=1)).square().mean((1, 2, 3)).mean().backward()
            optimizer.step()
        rows = block_of(path).curvature
        assert rows is not None
        actual.append(rows.flatten(0, 1))
    assert_close(actual[0], actual[1], 1e-12)
