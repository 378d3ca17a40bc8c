"""AdamW runs, asked: against finite differences of torch's own optimizer with its second moment held as it was."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support import adam, oracles
from tests.support.adam import Tiny, adamw, projected
from tests.support.loops import (
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    normal,
    one_backward_each,
    seeded,
    terms_of,
    trained_names,
)
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.store import RunStore

STEPS, SIZE, H = 5, 3, 2e-3
ROUNDING = 3e-7  # P is kept as float32, 6e-8 at each of five steps
QUERY = (normal(2, 4, seed=5), torch.tensor([0, 2]))
State = dict[str, Tensor]


def data(ids: list[int]) -> tuple[Tensor, Tensor]:
    return torch.stack([normal(4, seed=300 + i) for i in ids]), torch.tensor([i % 3 for i in ids])


def adam_l2(model: nn.Module) -> torch.optim.Adam:
    weight, bias = model.parameters()
    groups: list[dict[str, Any]] = [{"params": [weight]}, {"params": [bias], "lr": 0.1, "weight_decay": 0.0}]
    return torch.optim.Adam(groups, lr=0.05, weight_decay=0.2, betas=(0.7, 0.95))


MAKERS: dict[str, Any] = {
    "AdamW": adamw,
    "AdamW, amsgrad": lambda m: adamw(m, amsgrad=True),
    "Adam, L2": adam_l2,
    "NAdam": lambda m: torch.optim.NAdam(m.parameters(), lr=0.05, betas=(0.7, 0.95), weight_decay=0.2),
    "RAdam": lambda m: torch.optim.RAdam(m.parameters(), lr=0.05, betas=(0.7, 0.7), weight_decay=0.2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.05, alpha=0.9, eps=1e-3, weight_decay=0.2),
    "Adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.1, lr_decay=0.3, eps=1e-3, weight_decay=0.2),
}
V = {"exp_avg_sq": "betas", "square_avg": "alpha", "sum": None}  # what torch calls v, and where its decay is


def train(name: str, max_norm: float | None, weights: Tensor, held: list[State] | None, path: Path | None) -> nn.Module:
    """A softmax regression with weights (STEPS, SIZE); `held` fills with second moments, or gives them if it is full."""
    model = seeded(nn.Linear(4, 3))
    optimizer = MAKERS[name](model)
    replay, kept = bool(held), [] if held is None else held
    rec = None
    if path is not None:
        rec = backstory.record(model, optimizer, path, loss_reduction="mean", projection="full", encoding="float64",
                               curvature="exact:3").__enter__()  # fmt: skip
    for t in range(STEPS):
        x, y = data(ids_of(t, SIZE))
        optimizer.zero_grad()
        if rec is None:
            (weights[t] * F.cross_entropy(model(x), y, reduction="none")).sum().backward()
            _clip(model, max_norm)
            if replay:
                _hold(model, optimizer, kept[t])
            optimizer.step()
        else:
            with rec.step(ids_of(t, SIZE)) as s:
                out = model(x)
                s.outputs(out, "cross-entropy")
                F.cross_entropy(out, y).backward()
                _clip(model, max_norm)
                optimizer.step()
        if not replay:
            kept.append({f"{n}/{k}": v.clone() for n, p in model.named_parameters()
                         for k, v in optimizer.state[p].items() if "sq" in k or k in V})  # fmt: skip
            kept[-1]["P"] = diagonal(model, optimizer)
    if rec is not None:
        rec.__exit__(None, None, None)
    return model


def diagonal(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    """P of all parameters, by the formulas of torch's documentation."""
    if isinstance(optimizer, torch.optim.Adam | torch.optim.NAdam):
        return adam.second_moments(model, optimizer)[1]
    out = []
    for p in model.parameters():
        state, group = optimizer.state[p], optimizer.param_groups[0]
        s, v = state["step"].item(), next(state[k] for k in V if k in state)
        if not isinstance(optimizer, torch.optim.RAdam):
            out.append(1 / (v.sqrt() + group["eps"]))
            continue
        beta, longest = group["betas"][1], 2 / (1 - group["betas"][1]) - 1
        late = longest - 2 * s * beta**s / (1 - beta**s) > 5
        out.append((1 - beta**s) ** 0.5 / (v.sqrt() + group["eps"]) if late else torch.ones_like(v))
    return torch.cat([x.flatten() for x in out])


def _clip(model: nn.Module, max_norm: float | None) -> None:
    if max_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _hold(model: nn.Module, optimizer: torch.optim.Optimizer, after: State) -> None:
    """Such a second moment before torch's step that its own update gives the one of the undisturbed run."""
    for name, p in model.named_parameters():
        state = optimizer.state[p]
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p))
            state.update(mu_product=torch.ones(()), square_avg=torch.zeros_like(p))
        (group,) = [g for g in optimizer.param_groups if any(p is q for q in g["params"])]
        assert p.grad is not None
        l2 = 0.0 if isinstance(optimizer, torch.optim.AdamW) else group["weight_decay"]
        name_v = next(k for k in V if f"{name}/{k}" in after)
        decay = V[name_v]
        b = 1.0 if decay is None else group[decay][1] if decay == "betas" else group[decay]
        u, fresh = (p.grad + l2 * p).detach(), 1.0 if decay is None else 1 - b
        state[name_v] = (after[f"{name}/{name_v}"] - fresh * u.square()) / b
        if group.get("amsgrad"):
            state["max_exp_avg_sq"] = after[f"{name}/max_exp_avg_sq"].clone()


def differences(name: str, max_norm: float | None, held: list[State]) -> Tensor:
    """∂/∂ε of the query losses with the weight (1−ε)w, for every occurrence: (Q, STEPS · SIZE)."""

    def at(t: int, i: int, eps: float) -> Tensor:
        weights = torch.full((STEPS, SIZE), 1 / SIZE, dtype=torch.float64)
        weights[t, i] *= 1 - eps
        return cross_entropy(train(name, max_norm, weights, held, None), QUERY).detach()

    out = []
    for t in range(STEPS):
        for i in range(SIZE):
            low, less, more, high = (at(t, i, k * H) for k in (-2, -1, 1, 2))
            out.append((low - 8 * less + 8 * more - high) / (12 * H))
    return torch.stack(out, 1)


@pytest.mark.parametrize("max_norm", [None, 0.15])
@pytest.mark.parametrize("name", MAKERS)
def test_influences_are_finite_differences_of_torchs_own_steps(
    name: str, max_norm: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[State] = []
    model = train(name, max_norm, torch.empty(0), held, tmp_path / "run")
    run = backstory.open(tmp_path / "run")
    clipped = run.steps().clip < 1
    assert clipped.all() if max_norm else not clipped.any()
    expected = differences(name, max_norm, held)
    answer = run.query(model, cross_entropy, QUERY, contraction="never")
    causes = "Only early steps: momentum or decay. All: the rate, P or the bias correction. -1: the sign."
    assert_close(answer.scores.T, expected.T, ROUNDING, causes)
    run.embed(contraction="never", dtype=torch.float64, encoding="float64")
    embedded = run.query(model, cross_entropy, QUERY, contraction="never", method="embeddings")
    assert_close(embedded.scores.T, expected.T, ROUNDING, causes)
    P = torch.stack([x["P"] for x in held])
    torch.testing.assert_close(run._store.diagonal(0, STEPS), P.float(), rtol=1e-6, atol=0)
    monkeypatch.setattr(RunStore, "diagonal", lambda self, lo, hi: P[lo:hi])  # in float64, all that is left is exact
    assert_close(
        run.query(model, cross_entropy, QUERY, contraction="never", method="adjoint").scores.T, expected.T, 1e-9, causes
    )


SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"projection": "full"},
    "mask": {"projection": "mask", "rank": 2},
    "random": {"projection": "random", "rank": 2},
    "learned": {"projection": "learned", "rank": 2, "warmup_steps": 3, "curvature_of": "steps"},
    "learned, split rows": {
        "projection": "learned",
        "rank": 2,
        "warmup_steps": 3,
        "curvature": "empirical/3",
        "curvature_of": "steps",
    },
    "full, split rows": {"projection": "full", "curvature": "empirical/3"},
}


def sequences(ids: Sequence[int]) -> tuple[Tensor, ...]:
    return (torch.stack([torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(i)) for i in ids]),)


def next_token(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(batch[0])[:, :-1]
    return F.cross_entropy(out.mT, batch[0][:, 1:], reduction="none").mean(1)


@pytest.mark.parametrize("per_layer", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", SETTINGS)
def test_embeddings_and_adjoint_agree(case: str, per_layer: bool, tmp_path: Path) -> None:
    model = seeded(Tiny())
    settings = {"tokens": 4, "max_norm": 0.5, "losses": next_token, "batch": sequences, **SETTINGS[case]}
    adam.record(tmp_path / "run", model, adamw(model), 6, **settings)
    run = backstory.open(tmp_path / "run")
    assert (run.steps().clip < 1).any()
    question = (model, next_token, sequences([20, 21, 22]))
    for contraction in ("never", "always", "auto"):
        run.embed(contraction=contraction, per_layer=per_layer, dtype=torch.float64, encoding="float64")
        by_rows = run.query(*question, contraction=contraction, per_layer=per_layer, method="adjoint").scores
        by_embeddings = run.query(*question, contraction=contraction, per_layer=per_layer, method="embeddings").scores
        assert_close(by_embeddings, by_rows, 1e-9)
        assert by_rows.abs().max() > 1e-6
    run.embed(per_layer=per_layer, encoding="float32")
    assert_close(run.query(*question, per_layer=per_layer, method="embeddings").scores, by_rows, 1e-5)


@pytest.mark.parametrize(
    ("curvature", "form"),
    [("empirical", "when_expanding"), ("empirical/1", "when_expanding"), ("empirical/2", "always")],
)
def test_auto_is_the_implicit_form_where_rows_are_taken_apart(curvature: str, form: Any, tmp_path: Path) -> None:
    model = seeded(Tiny())
    settings: dict[str, Any] = {
        "tokens": 4, "losses": next_token, "batch": sequences, "projection": "full", "curvature": curvature,
    }  # fmt: skip
    adam.record(tmp_path / "run", model, adamw(model), 6, **settings)
    run = backstory.open(tmp_path / "run")
    assert run.form() == run.form(form) == form
    question = (model, next_token, sequences([20, 21, 22]))
    actual = {
        contraction: run.query(*question, contraction=contraction).scores
        for contraction in ("auto", "when_expanding", "always", "never")
    }
    assert_same(actual["auto"], actual[form], 2 * terms_of(model, 6, 3 * 5))
    assert not torch.allclose(actual["when_expanding"], actual["always"], rtol=1e-3)
    run.embed()
    assert run.query(*question).method == run.query(*question, contraction=form).method == "embeddings"
    assert run.query(*question, contraction="never").method == "adjoint"
    with pytest.raises(
        UsageError, match=r"contraction must be 'auto', 'always', 'never', 'when_expanding' .* got 'literal'"
    ):
        run.query(*question, contraction="literal")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"contraction must be .* got -1"):
        run.embed(contraction=-1)


@pytest.mark.parametrize("case", ["full", "random", "learned"])
def test_a_question_at_a_checkpoint_is_that_to_a_run_that_ended_there(case: str, tmp_path: Path) -> None:
    """The second moment of that step, not of the last, gives the query its coordinates."""
    model, short = mlp(), mlp()
    adam.record(tmp_path / "long", model, adamw(model), 9, planned=9, checkpoints=2, **SETTINGS[case])
    adam.record(tmp_path / "short", short, adamw(short), 6, **SETTINGS[case])
    run, query = backstory.open(tmp_path / "long"), batch_of([3, 7])
    asked = run.load_weights(mlp(seed=4), at=6)
    actual = run.query(asked, cross_entropy, query, at=6)
    expected = backstory.open(tmp_path / "short").query(short, cross_entropy, query)
    assert_same(actual.scores, expected.scores, 2 * terms_of(short, 6))
    if case == "full":
        assert len(run.query(asked, cross_entropy, query, at=5, unverified=True)) == 15
        return
    with pytest.raises(UsageError, match=r"has those of steps \[3, 6, 9\] but not of step 5.*checkpoints=K"):
        run.query(asked, cross_entropy, query, at=5, unverified=True)


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("case", ["random", "learned", "learned, split rows"])
def test_answers_in_adams_coordinates_are_those_of_autograd_through_the_scaled_steps(
    case: str, max_norm: float | None, tmp_path: Path
) -> None:
    """Rows P^½ g and queries P^½ v of one backward each, P = 1, the rest by hand: nothing is read from the run but its basis."""
    model, path = seeded(Tiny()), tmp_path / "run"
    split = 3 if "split" in case else 1
    settings: dict[str, Any] = {
        "tokens": 4,
        "losses": next_token,
        "batch": sequences,
        "max_norm": max_norm,
        "groups": split,
    }
    seen = adam.record(path, model, adamw(model), 5, **settings, **SETTINGS[case])
    sizes = torch.cat([torch.full((p.numel(),), float(p.dim() > 1)).double() for p in model.parameters()])
    wide = _kept(model, path, sizes)  # 1 in the first group, the matrices
    one, steps = torch.ones_like(wide), []
    for t, x in enumerate(seen):
        V = projected(x.pieces * x.half, model, path).flatten(0, 1)
        G, kappa = projected(x.rows * x.half, model, path), (4 if split > 1 else 1) / 3
        products, of_pieces = adam.met(x.rows, x, t, model, path), adam.met(x.pieces, x, t, model, path).flatten()
        clip, n = _by_products(x, G, products, max_norm)
        H = kappa * (V.T @ V if max_norm is None else clip * _clipped(V, of_pieces, n).T @ V)
        G = G if max_norm is None else clip * _clipped(G, products, n)
        steps.append(
            oracles.Recorded(
                G=G, w=one[:3] / 3, H=H, max_norm=1e30, rate=0.05 * one - 0.03 * wide, l2=0 * one, decay=0.3 * wide,
                momentum=0.8 * one, tau=0.8 * one, a=one / (1 - 0.8 ** (t + 1)), n=0 * one, P=one,
            )
        )  # fmt: skip
    question = sequences([20, 21])
    v = projected(one_backward_each(model, question, next_token, trained_names(model)) * seen[-1].half, model, path)
    expected = v @ torch.cat(oracles.unrolled(steps)[0]).T
    answer = backstory.open(path).query(model, next_token, question, contraction="never")
    assert_close(answer.scores, expected, 1e-8, "A common ratio for each query: the scale of another step.")


def _kept(model: nn.Module, path: Path, sizes: Tensor) -> Tensor:
    """Which kept coordinates belong to matrices."""
    dims = RunStore.open(path).dims
    parts = sizes.split([model.get_parameter(n).numel() for n in trained_names(model)])
    return torch.cat([x[:1].expand(d) for x, d in zip(parts, dims, strict=True)])


def _by_products(x: adam.Seen, G: Tensor, products: Tensor, max_norm: float | None) -> tuple[float, Tensor]:
    """`(c, ρ n/Σ w ⟨g, ∇L⟩)` of a clipped step."""
    norm = float(x.whole.norm())
    assert max_norm is None or norm > max_norm
    return (max_norm or 1.0) / (norm + 1e-6), G.mean(0) * norm / ((norm + 1e-6) * products.mean())


def _clipped(rows: Tensor, products: Tensor, n: Tensor) -> Tensor:
    """The derivative of clipping, seen in the kept coordinates: g − n ⟨g, ∇L⟩/‖∇L‖²."""
    return rows - torch.outer(products, n)


@pytest.mark.parametrize("case", SETTINGS)
def test_removal_of_a_sample_that_occurs_once_is_its_influence(case: str, tmp_path: Path) -> None:
    model = seeded(Tiny())
    settings = {"tokens": 4, "losses": next_token, "batch": sequences, **SETTINGS[case]}
    adam.record(tmp_path / "run", model, adamw(model), 4, **settings)
    run = backstory.open(tmp_path / "run")
    once, often = ids_of(3), [i for i in ids_of(0) if i in ids_of(3)]
    question = (model, next_token, sequences([20, 21]))
    effect = run.predict_removal(range(9), *question)
    answer = run.query(*question)
    assert_close(effect.plain, torch.stack([answer.sum_over([i]) for i in range(9)], 1), 1e-12)
    single = [i for i in range(9) if i not in once]
    assert_close(
        effect.corrected[:, single], effect.plain[:, single], 1e-9, "with one occurrence there is no correction"
    )
    assert all(not torch.allclose(effect.corrected[:, i], effect.plain[:, i], rtol=1e-6) for i in often)


def test_the_proxy_is_still_there_by_name(tmp_path: Path) -> None:
    model = mlp()
    adam.record(tmp_path / "run", model, adamw(model), 4, projection="learned", rank=2, optimizer_model="sgd")
    run = backstory.open(tmp_path / "run")
    said = {k: run.config["optimizer"][k] for k in ("class", "modelled_as", "coordinates")}
    assert said == {"class": "AdamW", "modelled_as": "sgd", "coordinates": "raw"}
    assert not [n for n in run._store.tensor_names() if n.startswith("scale-")]
    assert run.steps().groups["momentum"].tolist() == [[0.0, 0.0]] * 4
    answer = run.query(model, cross_entropy, batch_of([1]))
    assert any("AdamW's steps are treated as plain SGD" in n for n in answer.caveats)
    assert (
        run.recording_report()
        .words[0]
        .endswith("(the paper's proxy), without AdamW's second moment, momentum 0.8 and weight decay 0 to 0.3.")
    )
