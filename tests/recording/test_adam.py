"""Rows in Adam's coordinates, against one backward pass for each sample and P by its formula from torch's own state."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.run.test_run_adam import next_token, sequences
from tests.support import adam
from tests.support.adam import Tiny, adamw, projected
from tests.support.loops import (
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    one_backward_each,
    seeded,
    stored,
    train,
    trained_names,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import CoverageError, UnsupportedError
from backstory.maths import adam as preconditioner
from backstory.maths.adam import Scale
from backstory.recording import adam as adaptive
from backstory.store import RunStore
from backstory.store.bases import load_scales

STEPS = 5
RANDOM: dict[str, Any] = {"projection": "random", "rank": 2}
LEARNED: dict[str, Any] = {"projection": "learned", "rank": 2, "warmup_steps": 3, "curvature_of": "steps"}
TEXT: dict[str, Any] = {"losses": next_token, "batch": sequences}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not foreach": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
}
CAUSES = "Ratios that differ between rows of a matrix: the wrong factor. A common one: bias correction or the weight."


def step_before(model: nn.Module, optimizer: torch.optim.Optimizer, times: int) -> None:
    """Training that nobody records, with gradients of another size."""
    for t in range(times):
        optimizer.zero_grad()
        (3.0 * cross_entropy(model, batch_of(ids_of(20 + t)))).mean().backward()
        optimizer.step()


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("projection", [RANDOM, LEARNED], ids=["random", "learned"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_scaled_and_then_projected(
    variant: str, projection: dict[str, Any], max_norm: float | None, tmp_path: Path
) -> None:
    model = mlp()
    optimizer = adamw(model, **VARIANTS[variant])
    seen = adam.record(tmp_path / "run", model, optimizer, STEPS, max_norm=max_norm, micro=3, **projection)
    actual = stored(tmp_path / "run")
    expected = torch.cat([projected(s.rows * s.half, model, tmp_path / "run") for s in seen])
    assert_close(actual.rows, expected, 1e-9, CAUSES)
    gdot = torch.cat([adam.met(s.rows, s, t, model, tmp_path / "run") for t, s in enumerate(seen)])
    if max_norm is not None:
        assert (actual.table.clip < 1).all()
        np.testing.assert_allclose(actual.table.clip, [max_norm / (s.whole.norm() + 1e-6) for s in seen], rtol=1e-10)
        assert_close(actual.gdot, gdot, 1e-10, "⟨g, ∇L⟩ must be taken in unscaled coordinates")
    sizes = [float((s.whole * s.half).square().sum()) for s in seen]
    np.testing.assert_allclose(actual.table.size, sizes, rtol=1e-9)
    assert actual.table.coverage.tolist() == [1.0] * STEPS
    changes = [2 * (now.half / old.half).log() for old, now in pairwise(seen)]  # of log P
    drifts = [0.0, *(float(x.square().mean().sqrt()) for x in changes)]
    np.testing.assert_allclose(actual.table.drift, drifts, rtol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("projection", [RANDOM, LEARNED], ids=["random", "learned"])
def test_rows_of_sequences(projection: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """Unseen tokens have no second moment, and no row."""
    model = seeded(Tiny(tied))
    seen = adam.record(tmp_path / "run", model, adamw(model), STEPS, max_norm=0.2, micro=3, **TEXT, **projection)
    actual = stored(tmp_path / "run")
    expected = torch.cat([projected(s.rows * s.half, model, tmp_path / "run") for s in seen])
    assert_close(actual.rows, expected, 1e-9, CAUSES)
    gdot = torch.cat([adam.met(s.rows, s, t, model, tmp_path / "run") for t, s in enumerate(seen)])
    assert_close(actual.gdot, gdot, 1e-9)
    assert (actual.table.clip < 1).all()
    if not tied:
        assert (seen[0].half == 0).any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("projection", ["full", "mask"])
def test_full_and_masked_rows_are_raw_and_have_the_diagonal_beside_them(
    projection: str, variant: str, tmp_path: Path
) -> None:
    model = mlp()
    optimizer = adamw(model, **VARIANTS[variant])
    seen = adam.record(tmp_path / "run", model, optimizer, STEPS, projection=projection, rank=2)
    store = RunStore.open(tmp_path / "run")
    P = store.diagonal(0, STEPS)
    assert P is not None
    chosen = _kept_coordinates(store, model)
    assert_close(stored(tmp_path / "run").rows, torch.cat([s.rows[:, chosen] for s in seen]), 1e-10)
    torch.testing.assert_close(P, torch.stack([s.P[chosen] for s in seen]).float(), rtol=1e-6, atol=0)
    assert store.config["optimizer"]["coordinates"] == "raw"
    assert not [n for n in store.tensor_names() if n.startswith("scale-")]


def _kept_coordinates(store: RunStore, model: nn.Module) -> Tensor:
    """Which entries of all trained parameters are kept."""
    sides, out, lo = store.load_tensors("basis"), [], 0
    for name in trained_names(model):
        p = model.get_parameter(name)
        places = (lo + torch.arange(p.numel())).reshape(len(p), -1)
        rows, columns = (sides.get(f"{name}/{side}", torch.arange(n)) for side, n in zip(("left", "right"), places.shape, strict=True))  # fmt: skip
        out.append(places[rows][:, columns].flatten())
        lo += p.numel()
    return torch.cat(out)


@pytest.mark.parametrize("before", [0, 4])
@pytest.mark.parametrize("kind", ["AdamW", "Adam", "Adam, decoupled"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_coefficients_are_those_of_the_optimizers_own_count(
    variant: str, kind: str, before: int, tmp_path: Path
) -> None:
    model = mlp()
    groups: list[dict[str, Any]] = [
        {"params": list(model.parameters())[:2], "weight_decay": 0.3, "betas": (0.7, 0.99)},
        {"params": list(model.parameters())[2:], "lr": 0.2},
    ]
    make: Any = torch.optim.AdamW if kind == "AdamW" else torch.optim.Adam
    more = {"decoupled_weight_decay": True} if kind == "Adam, decoupled" else {}
    optimizer = make(groups, lr=0.1, weight_decay=0.1, **VARIANTS[variant], **more)
    step_before(model, optimizer, before)
    seen = adam.record(tmp_path / "run", model, optimizer, 3, projection="full")
    table = stored(tmp_path / "run").table.groups
    P = RunStore.open(tmp_path / "run").diagonal(0, 3)
    assert P is not None
    torch.testing.assert_close(P, torch.stack([s.P for s in seen]).float(), rtol=1e-6, atol=0)
    inside, outside = ("l2", "decay") if kind == "Adam" else ("decay", "l2")
    for t in range(3):
        s = before + t + 1
        assert table["rate"][t].tolist() == [0.1, 0.2]
        assert table[inside][t].tolist() == [0.3, 0.1]
        assert table[outside][t].tolist() == [0.0, 0.0]
        assert table["momentum"][t].tolist() == table["tau"][t].tolist() == [0.7, 0.9]
        np.testing.assert_allclose(table["a"][t], [1 / (1 - 0.7**s), 1 / (1 - 0.9**s)], rtol=1e-14)
        assert table["n"][t].tolist() == [0.0, 0.0]


@pytest.mark.usefixtures("scales_of_each_step")
@pytest.mark.parametrize("projection", [RANDOM, LEARNED], ids=["random", "learned"])
def test_recording_may_begin_in_the_middle(projection: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    optimizer = adamw(model)
    step_before(model, optimizer, 4)
    seen = adam.record(tmp_path / "run", model, optimizer, STEPS, **projection)
    actual = stored(tmp_path / "run")
    expected = torch.cat([projected(s.rows * s.half, model, tmp_path / "run") for s in seen])
    assert_close(actual.rows, expected, 1e-9, CAUSES)
    assert (actual.table.drift > 0).all(), "the second moment before the first recorded step is known"


@pytest.mark.parametrize("projection", [RANDOM, LEARNED], ids=["random", "learned"])
def test_l2_inside_the_gradient_is_refused_before_the_model_moves(projection: dict[str, Any], tmp_path: Path) -> None:
    model = mlp()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    with pytest.raises(UnsupportedError, match=r"an L2 term inside the gradient.*Use AdamW, or.*'mask' or 'full'"):
        adam.record(tmp_path / "run", model, optimizer, 1, **projection)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Half(nn.Module):
    """Its second layer takes part only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.both = nn.Linear(3, 2), nn.Linear(3, 2), True

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x)
        return out + self.second(x) if self.both else out


@pytest.mark.parametrize("projection", ["full", "random"])
def test_a_parameter_without_gradient_is_refused(projection: str, tmp_path: Path) -> None:
    model = seeded(Half())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with (
        pytest.raises(UnsupportedError, match="2 parameters of an optimizer group got no gradient"),
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", projection=projection) as rec,
    ):
        for both in (True, False):
            model.both = both  # type: ignore[assignment]
            optimizer.zero_grad()
            with rec.step([0, 1, 2]):
                cross_entropy(model, batch_of([0, 1, 2])).mean().backward()
                optimizer.step()
    assert backstory.open(tmp_path / "run").n_steps == 1


class Outside(Tiny):
    """Uses a layer's weight once more, outside its module's forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = super().forward(tokens) + 0.1 * nn.functional.linear(self.token(tokens), self.head.weight)
        return out


@pytest.mark.parametrize("curvature", ["empirical", "empirical/3"])
@pytest.mark.parametrize("projection", [{"projection": "full"}, RANDOM, LEARNED], ids=["full", "random", "learned"])
def test_the_safety_net_holds(projection: dict[str, Any], curvature: str, tmp_path: Path) -> None:
    model = seeded(Outside())
    with pytest.raises(CoverageError, match=r"'head.weight' do not add up .* in step 0 .*used outside"):
        adam.record(tmp_path / "run", model, adamw(model), 1, tokens=4, curvature=curvature, **TEXT, **projection)
    assert backstory.open(tmp_path / "run").n_steps == 0


def test_scales_survive_the_disk(tmp_path: Path) -> None:
    model = mlp()
    seen = adam.record(tmp_path / "run", model, adamw(model), 4, planned=4, checkpoints=1, **RANDOM)
    store = RunStore.open(tmp_path / "run")
    assert [n for n in store.tensor_names() if n.startswith("scale-")] == ["scale-00000002", "scale-00000004"]
    for step in (2, 4):
        scales = load_scales(store, step)
        assert scales is not None
        written = [s.left if s.right is None else torch.outer(s.left, s.right).flatten() for s in scales]
        assert_close(torch.cat(written), seen[step - 1].half, 1e-12, "P of the step *before* the checkpoint")


def scaled_run(path: Path, fused: bool, unscale: bool, max_norm: float | None) -> tuple[list[Tensor], int]:
    """Four steps, the second with an infinite loss, under torch's own scaler; true rows of the others."""
    model = mlp().float()
    optimizer = adamw(model, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    expected, settings = [], {"loss_reduction": "mean", "encoding": "float64", **RANDOM}
    with backstory.record(model, optimizer, path, scaler=scaler, **settings) as rec:
        for t in range(4):
            x, y = batch_of(ids_of(t))
            batch = (x.float(), y)
            rows = one_backward_each(model, batch, cross_entropy, trained_names(model))
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                scaler.scale(cross_entropy(model, batch).mean() * (torch.inf if t == 1 else 1.0)).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                scaler.step(optimizer)
                scaler.update()
            if t != 1:
                half = adam.second_moments(model, optimizer)[0]
                expected.append(projected((rows * half).double(), model, path))
    return expected, rec.skipped


@pytest.mark.parametrize(
    ("fused", "unscale", "max_norm"),
    [(False, False, None), (False, True, None), (True, True, None), (False, True, 0.2), (True, True, 0.2)],
)
def test_a_loss_scale_is_taken_out(fused: bool, unscale: bool, max_norm: float | None, tmp_path: Path) -> None:
    expected, skipped = scaled_run(tmp_path / "run", fused, unscale, max_norm)
    actual = stored(tmp_path / "run")
    assert skipped == 1
    assert_close(actual.rows, torch.cat(expected), 1e-4, "1024 or its inverse: the loss scale was not taken out once.")
    assert (actual.table.clip < 1).all() == (max_norm is not None)


def test_a_fused_step_that_unscales_by_itself_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"fused optimizer.*scaler.unscale_\(optimizer\) before scaler.step"):
        scaled_run(tmp_path / "run", fused=True, unscale=False, max_norm=None)
    assert backstory.open(tmp_path / "run").n_steps == 0


@pytest.mark.parametrize("curvature", ["empirical", "empirical/3"])
def test_a_subspace_is_learned_in_adams_coordinates(curvature: str, tmp_path: Path) -> None:
    """From the scaled rows of the warm-up, each group of positions a row of its own where they are kept so."""
    model = seeded(Tiny())
    settings = {"tokens": 4, "curvature": curvature, "micro": 3, **TEXT, **LEARNED}
    groups = 3 if curvature == "empirical/3" else 1
    seen = adam.record(tmp_path / "run", model, adamw(model), STEPS, groups=groups, **settings)
    basis, lo = RunStore.open(tmp_path / "run").load_tensors("basis"), 0
    warm = torch.cat([(s.pieces * s.half).flatten(0, 1) for s in seen[:3]])
    for name in trained_names(model):
        p = model.get_parameter(name)
        G = warm[:, lo : lo + p.numel()].reshape(len(warm), len(p), -1)
        lo += p.numel()
        for side, moment in (("left", torch.einsum("bij,bkj->ik", G, G)), ("right", torch.einsum("bij,bik->jk", G, G))):
            if (L := basis.get(f"{name}/{side}")) is not None:
                best = torch.linalg.eigvalsh(moment)[-L.shape[1] :].sum()
                assert float((L.T @ moment @ L).trace() / best) == pytest.approx(1, abs=1e-10), f"{name}, {side}"
    assert any("head.weight" in k for k in basis)


def test_p_is_read_at_every_step_at_first_and_then_as_often_as_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """v̂ is a mean over min(t, 1/(1−β₂)) steps; it is read again before 5 % of it can be new."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    read: list[int] = []
    plain = preconditioner.factor_scale

    def counted(*args: Any) -> Scale:
        read.append(int(next(iter(optimizer.state.values()))["step"]))
        return plain(*args)

    monkeypatch.setattr(adaptive, "factor_scale", counted)
    train(tmp_path / "run", model, optimizer, 130, projection="random", rank=3)
    steps = sorted(set(read))
    assert steps[:39] == list(range(1, 40))
    gaps = [b - a for a, b in pairwise(steps)]
    assert max(gaps) == 6
    assert all(gap <= max(1, 0.05 * b) for gap, b in zip(gaps, steps[1:], strict=True))
    assert len(read) % len(steps) == 0, "all parameters at the same steps"


def test_p_that_forgets_quickly_is_read_at_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    read: list[int] = []
    plain = preconditioner.factor_scale

    def counted(*args: Any) -> Scale:
        read.append(0)
        return plain(*args)

    monkeypatch.setattr(adaptive, "factor_scale", counted)
    train(tmp_path / "run", model, optimizer, 60, projection="random", rank=3)
    assert len(read) == 60 * len(list(model.parameters()))


@pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
def test_gradients_that_can_be_differentiated_again_are_recorded(tmp_path: Path) -> None:
    """`backward(create_graph=True)` leaves gradients with a graph of their own."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **RANDOM) as rec:
        for t in range(2):
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward(create_graph=True)
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step()
            optimizer.zero_grad()
    assert backstory.open(tmp_path / "run").n_steps == 2
