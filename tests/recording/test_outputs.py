"""Which losses the first step tells, from torch's own gradients; the Gauss-Newton matrix that is then recorded, by hand; and nothing else changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recording.test_windows import SIZE, budget, is_seen, same_windows, windows_of
from tests.support.adam import adamw, projected, second_moments
from tests.support.loops import (
    Interrupted,
    batch_of,
    ids_of,
    mlp,
    normal,
    restore,
    seeded,
    sgd,
    snapshot,
    stored,
    trained_names,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import MismatchError
from backstory.recording.outputs import loss_of
from backstory.store import RunStore

pytestmark = pytest.mark.usefixtures("scales_of_each_step")
STEPS, CLASSES, N = 11, 4, 12
AUTO: dict[str, Any] = {"loss_reduction": "mean", "encoding": "float64", "rank": 2, "warmup_steps": 3}
Loss = Callable[[Tensor, Tensor], Tensor]  # outputs, labels -> the loss of the batch


def labels(n: int = N) -> Tensor:
    return torch.arange(n) % CLASSES


def told(
    loss: Callable[[Tensor], Tensor], *shape: int, weight: float = 1 / N, dtype: torch.dtype = torch.float64
) -> Any:
    """What outputs of this shape and the gradient of the loss at them tell."""
    f = (2 * normal(*shape, seed=4)).to(dtype).requires_grad_()
    (delta,) = torch.autograd.grad(loss(f), f)
    found = loss_of(f.detach(), delta, torch.full((shape[0],), weight, dtype=torch.float64))
    return None if found is None else tuple(found)


HOT = F.one_hot(labels(), CLASSES).double()
KNOWN: dict[str, Any] = {
    "cross-entropy": (lambda f: F.cross_entropy(f, labels()), 1 / N, ("cross-entropy", "sum", CLASSES)),
    "cross-entropy, sum": (
        lambda f: F.cross_entropy(f, labels(), reduction="sum"),
        1.0,
        ("cross-entropy", "sum", CLASSES),
    ),
    "smoothed": (lambda f: F.cross_entropy(f, labels(), label_smoothing=0.1), 1 / N, ("cross-entropy", "sum", CLASSES)),
    "soft labels": (lambda f: F.cross_entropy(f, (2 * HOT + 1).softmax(1)), 1 / N, ("cross-entropy", "sum", CLASSES)),
    "scaled": (lambda f: 1024 * F.cross_entropy(f, labels()), 1024 / N, ("cross-entropy", "sum", CLASSES)),
    "bce": (lambda f: F.binary_cross_entropy_with_logits(f, HOT), 1 / N, ("bce", "mean", CLASSES)),
    "bce, sum": (lambda f: F.binary_cross_entropy_with_logits(f, HOT, reduction="sum"), 1.0, ("bce", "sum", CLASSES)),
}
UNKNOWN: dict[str, Any] = {
    "squared error": lambda f: F.mse_loss(f, HOT),
    "hinge": lambda f: F.multi_margin_loss(f, labels()),
    "weighted classes": lambda f: F.cross_entropy(f, labels(), weight=torch.tensor([0.2, 1.0, 3.0, 0.5]).double()),
    "weighted bce": lambda f: F.binary_cross_entropy_with_logits(f, HOT, pos_weight=torch.tensor(3.0).double()),
    "soft bce": lambda f: F.binary_cross_entropy_with_logits(f, 0.3 + 0.4 * HOT),
    "cold": lambda f: F.cross_entropy(3 * f, labels()),
    "another weight": lambda f: 2 * F.cross_entropy(f, labels()),
    "a penalty too": lambda f: F.cross_entropy(f, labels()) + f.square().mean(),
    "ignored": lambda f: F.cross_entropy(f, labels().where(labels() > 0, -100)),
}


@pytest.mark.parametrize("name", KNOWN)
def test_it_tells_a_loss(name: str) -> None:
    loss, weight, expected = KNOWN[name]
    assert told(loss, N, CLASSES, weight=weight) == expected


@pytest.mark.parametrize("name", UNKNOWN)
def test_it_does_not_mistake_another_loss(name: str) -> None:
    assert told(UNKNOWN[name], N, CLASSES) is None


@pytest.mark.parametrize(("outputs", "entries"), [((N,), 1), ((N, 1), 1), ((N, 2, 3), 6)], ids=str)
def test_single_outputs_and_several_of_a_sample(outputs: tuple[int, ...], entries: int) -> None:
    truth = (normal(*outputs, seed=8) > 0).double()
    found = told(lambda f: F.binary_cross_entropy_with_logits(f, truth, reduction="sum"), *outputs, weight=1.0)
    assert found == ("bce", "sum", entries)
    assert told(lambda f: F.mse_loss(f, truth, reduction="sum"), *outputs, weight=1.0) is None


@pytest.mark.parametrize(("classes", "known"), [(2, True), (32, True), (33, False)])
def test_outputs_must_be_few(classes: int, known: bool) -> None:
    assert (told(lambda f: F.cross_entropy(f, labels() % classes), N, classes) is not None) == known


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_is_precise_enough(dtype: torch.dtype) -> None:
    assert told(lambda f: F.cross_entropy(f.float(), labels()), N, CLASSES, dtype=dtype) == (
        "cross-entropy",
        "sum",
        CLASSES,
    )
    assert told(lambda f: F.binary_cross_entropy_with_logits(f.float(), HOT.float()), N, CLASSES, dtype=dtype) == (
        "bce", "mean", CLASSES,
    )  # fmt: skip
    assert told(lambda f: F.mse_loss(f.float(), HOT.float()), N, CLASSES, dtype=dtype) is None


@pytest.mark.parametrize("how", ["weight", "ignored"])
def test_it_does_not_mistake_weights_under_a_sum(how: str) -> None:
    """a (p − y), a ≤ 1, is p − y' with y' = (1 − a) p + a y: one for each sample, where smoothed labels have one shape."""
    more: dict[str, Any] = {"weight": {"weight": torch.tensor([0.2, 1.0, 0.4, 0.5]).double()}, "ignored": {}}[how]
    y = labels() if how == "weight" else labels().where(labels() > 0, -100)
    assert told(lambda f: F.cross_entropy(f, y, reduction="sum", **more), N, CLASSES, weight=1.0) is None


# recorded runs


class Wired(nn.Module):
    """Dropout, and a buffer that counts calls."""

    calls: Tensor

    def __init__(self, outputs: int = 2) -> None:
        super().__init__()
        self.first, self.drop, self.second = nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, outputs)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.second(self.drop(self.first(x).tanh()))
        return out


def three() -> nn.Module:
    """Three outputs: a rest is left."""
    return seeded(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))


def bce_mean(out: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(out, F.one_hot(y, out.shape[1]).double())


def jacobians(model: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    """(B, C, p) by one backward pass from every output of every sample."""
    parameters = [model.get_parameter(n) for n in trained_names(model)]
    rows = [
        torch.cat([g.flatten() for g in torch.autograd.grad(out[i, c], parameters, retain_graph=True)])
        for i in range(len(out))
        for c in range(out.shape[1])
    ]
    J: Tensor = torch.stack(rows).unflatten(0, out.shape[:2])
    return J


def training(
    path: Path | None,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    *,
    loss: Loss = F.cross_entropy,
    micro: int = 1,
    max_norm: float | None = None,
    start: int | None = None,
    states: list[Any] | None = None,
    inside: Callable[[int, Any, Tensor], None] = lambda t, s, out: None,
    each: Callable[[int], None] = lambda t: None,
    **settings: Any,
) -> None:
    """A loop that is recorded where there is a path."""
    settings = {**AUTO, **({} if start is None else {"resume": True, "start": start}), **settings}
    rec = None if path is None else backstory.record(model, optimizer, path, **settings)
    if rec is not None:
        rec.__enter__()
    for t in range(start or 0, steps):
        if states is not None:
            states.append(snapshot(model, optimizer))
        ids = ids_of(t, SIZE)
        optimizer.zero_grad()
        step = None if rec is None else rec.step()
        s = None if step is None else step.__enter__()
        for part in torch.tensor(ids).chunk(micro):
            x, y = batch_of(part.tolist())
            if s is not None:
                s.batch(part)
            out = model(x)
            if s is not None:
                inside(t, s, out)
            (loss(out, y) * len(part) / SIZE).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        each(t)
        if step is not None:
            step.__exit__(None, None, None)
    if rec is not None:
        rec.__exit__(None, None, None)


def hessian(kind: str, out: Tensor) -> Tensor:
    """(B, C, C) of each sample's loss in its outputs."""
    if kind == "cross-entropy":
        p = out.softmax(1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]
    p = out.sigmoid()
    D: Tensor = torch.diag_embed(p * (1 - p))
    return D / out.shape[1]  # the mean over the outputs


def own_of(path: Path) -> Tensor:
    """κ of each occurrence, (T, B)."""
    store = RunStore.open(path)
    own = store.read(0, store.n_rows()).own
    assert own is not None
    return own.reshape(-1, SIZE)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("case", ["sgd", "adamw, clipped"])
@pytest.mark.parametrize("kind", ["cross-entropy", "bce"])
def test_occurrences_and_windows_hold_the_exact_gauss_newton_matrix(
    kind: str, case: str, micro: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many passes as H has ranks: Σ w Jᵀ H J of the seen steps but the first, which told the loss, is Σ w κ g gᵀ and the window's."""
    passes = 2 if kind == "cross-entropy" else 3
    budget(monkeypatch, 2 * SIZE * passes)
    model, path = three(), tmp_path / "run"
    optimizer = sgd(model) if case == "sgd" else adamw(model)
    pieces: list[tuple[Tensor, Tensor]] = []

    def look(t: int) -> None:
        half = second_moments(model, optimizer)[0] if case != "sgd" else torch.ones(1, dtype=torch.float64)
        pieces[t] = pieces[t][0] * half, pieces[t][1]

    def before(t: int, s: Any, out: Tensor) -> None:
        if len(pieces) == t:
            pieces.append(by_hand(t))

    def by_hand(t: int) -> tuple[Tensor, Tensor]:
        twin = three()
        twin.load_state_dict(model.state_dict())
        x = batch_of(ids_of(t, SIZE))[0]
        out = twin(x)
        return jacobians(twin, x, out), hessian(kind, out.detach())

    loss = F.cross_entropy if kind == "cross-entropy" else bce_mean
    training(path, model, optimizer, loss=loss, micro=micro, inside=before, each=look,
             max_norm=None if case == "sgd" else 0.1, curvature=f"ggn:{passes}")  # fmt: skip
    config = RunStore.open(path).config
    assert config["settings"]["curvature"] == f"ggn:{passes}"
    assert config["outputs"] == {"kind": kind, "reduction": "sum" if kind == "cross-entropy" else "mean", "entries": 3}
    windows, rows, own = windows_of(path), stored(path).rows.reshape(STEPS, SIZE, -1), own_of(path)
    assert list(windows) == [(0, 4), (4, 8), (8, 11)]
    assert bool((own > 0).all())
    for (lo, hi), (V, _) in windows.items():
        of_steps, of_own = [], []
        for t in range(max(1, lo), hi):
            if is_seen(t):
                J = projected(pieces[t][0], model, path)
                of_steps.append(torch.einsum("bcp,bcd,bdq->pq", J, pieces[t][1], J) / SIZE)
                of_own.append(torch.einsum("b,bp,bq->pq", own[t], rows[t], rows[t]) / SIZE)
        rest = V.T @ V
        assert float(rest.trace()) > 1e-3 * float(of_steps[0].trace())
        assert_close(rest + torch.stack(of_own).mean(0), torch.stack(of_steps).mean(0), 1e-9, f"steps {lo} to {hi}")


@pytest.mark.parametrize("compressed", [False, True])
def test_queries_take_each_steps_own_curvature_and_its_windows(
    compressed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """x ← x − η (Σ w κ ⟨g, x⟩ g + VᵀV x), the influence η w ⟨g, x⟩, from what is stored; also in a compressed copy, and by embeddings."""
    budget(monkeypatch, 2 * SIZE)
    model, path = three(), tmp_path / "run"
    training(path, model, sgd(model), rank=4)
    own = own_of(path)
    if compressed:
        backstory.open(path).compress(tmp_path / "small", rank=64)
        path = tmp_path / "small"
    run, made = backstory.open(path), stored(path)
    batch = batch_of([0, 1, 2, 3])
    result = run.query(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, contraction="never")
    rows, weight = made.rows.reshape(STEPS, SIZE, -1), made.weight.reshape(STEPS, SIZE)
    model.zero_grad()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    flat = torch.cat([model.get_parameter(n).grad.flatten() for n in trained_names(model)])  # type: ignore[union-attr]
    x, expected = projected(flat[None], model, path)[0], list[Tensor]()
    windows = windows_of(path)
    for t in reversed(range(STEPS)):
        rate = float(made.table.groups["rate"][t][0])
        V = next(V for (lo, hi), (V, _) in windows.items() if lo <= t < hi)
        expected.insert(0, rate * weight[t] * (rows[t] @ x))
        x = x - rate * (rows[t].T @ (weight[t] * own[t] * (rows[t] @ x)) + V.T @ (V @ x))
    assert_close(result.scores[0], torch.cat(expected), 1e-9)
    run.embed(contraction="never")
    again = run.query(
        model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batch, contraction="never", method="embeddings"
    )
    assert_close(again.scores[0], torch.cat(expected), 2e-3)


def test_two_classes_leave_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """κ = p_y/(1 − p_y), and the windows are empty but for rounding."""
    budget(monkeypatch, 2 * SIZE)
    model, outs = mlp(), list[Tensor]()
    training(tmp_path / "run", model, sgd(model), inside=lambda t, s, out: outs.append(out.detach()))
    y = torch.stack([batch_of(ids_of(t, SIZE))[1] for t in range(STEPS)])
    p = torch.stack(outs).softmax(2).gather(2, y[..., None])[..., 0]
    assert_close(own_of(tmp_path / "run"), p / (1 - p), 1e-10)
    rows = stored(tmp_path / "run").rows
    assert all(
        float(V.square().sum()) < 1e-20 * float(rows.square().sum()) for V, _ in windows_of(tmp_path / "run").values()
    )


@pytest.mark.parametrize("make", [sgd, adamw], ids=["sgd", "adamw"])
@pytest.mark.parametrize("loss", [F.cross_entropy, bce_mean], ids=["cross-entropy", "bce"])
def test_training_is_not_changed(
    make: Callable[[nn.Module], torch.optim.Optimizer], loss: Loss, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, buffers and random numbers are those of a loop without recording, bit for bit."""
    budget(monkeypatch, 2 * SIZE)
    ends = []
    for path in (tmp_path / "run", None):
        torch.manual_seed(3)
        model = seeded(Wired())
        grads: list[Tensor] = []

        def keep(t: int, model: nn.Module = model, grads: list[Tensor] = grads) -> None:
            grads.extend(p.grad.clone() for p in model.parameters() if p.grad is not None)

        training(path, model, make(model), loss=loss, micro=3, max_norm=0.1, each=keep)
        ends.append([*grads, *model.state_dict().values(), torch.get_rng_state()])
    assert RunStore.open(tmp_path / "run").config["settings"]["curvature"] == "ggn:1"
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


class Twice(nn.Module):
    """Calls its inner model; or hands out what is no output of each sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 40 if how == "many" else 2)), how

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x)
        return {"tuple": (out, out), "twofold": torch.cat([out, out])}.get(self.how, out)


@pytest.mark.parametrize("how", ["squared error", "many", "tuple", "twofold", "model called twice"])
def test_where_the_loss_is_not_told_curvature_is_that_of_gradients(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget(monkeypatch, 2 * SIZE)
    model = seeded(Twice(how))

    def loss(out: Any, y: Tensor) -> Tensor:
        out = out[0] if isinstance(out, tuple) else out[: len(y)]
        if how == "model called twice":
            out = out + model(normal(len(y), 3))
        return F.mse_loss(out, F.one_hot(y, 2).double()) if how == "squared error" else F.cross_entropy(out, y)

    training(tmp_path / "run", model, sgd(model), 6, loss=loss)
    store = RunStore.open(tmp_path / "run")
    assert store.config["settings"]["curvature"] == "empirical"
    assert store.config.get("outputs") is None
    if how != "model called twice":
        rows = stored(tmp_path / "run").rows.reshape(6, SIZE, -1)
        V = windows_of(tmp_path / "run")[0, 4].V
        assert_close(V.T @ V, torch.stack([rows[t].T @ rows[t] / SIZE for t in (0, 2)]).mean(0), 1e-9)


def test_a_step_that_calls_the_model_again_gives_its_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that calls it without gradients does not; seen or not."""
    budget(monkeypatch, 2 * SIZE)
    whole: dict[str, Any] = {"projection": "full", "curvature_of": "windows"}
    x = batch_of([1, 2, 3])[0]

    def again(t: int, s: Any, out: Tensor) -> None:
        if t in (2, 3):
            model(x)
        with torch.no_grad():
            model(x)

    models = {"run": three(), "other": three()}
    model = models["run"]
    training(tmp_path / "run", model, sgd(model), 8, inside=again, **whole)
    training(tmp_path / "other", models["other"], sgd(models["other"]), 8, **whole)
    own, expected = own_of(tmp_path / "run"), own_of(tmp_path / "other")
    expected[2:4] = 1
    assert torch.equal(own, expected)
    here, there = windows_of(tmp_path / "run"), windows_of(tmp_path / "other")
    assert float(here[0, 4].V.abs().sum()) == 0, "step 2 alone was to give rows; the first step told the loss"
    assert torch.equal(here[4, 8].V, there[4, 8].V)
    assert RunStore.open(tmp_path / "run").config["missed"] == 2
    assert any(
        note.startswith("gradients stand in for ggn:1 curvature") for note in backstory.open(tmp_path / "run").caveats()
    )


def test_outputs_of_one_dimension_are_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), nn.Flatten(0)).double()
    optimizer, x = sgd(model), batch_of(range(6))[0]
    y = torch.tensor([0.0, 1, 1, 0, 1, 0], dtype=torch.float64)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", encoding="float64") as rec:
        for _ in range(12):
            with rec.step(range(6)):
                nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()
                optimizer.step()
            optimizer.zero_grad()
    store = RunStore.open(tmp_path / "run")
    assert store.config["settings"]["curvature"] == "ggn:1"
    own = store.read(0, store.n_rows()).own
    assert own is not None
    assert bool((own > 0).all())


@pytest.mark.parametrize("times", [0.1, 0.5])
def test_a_smaller_loss_of_a_new_net_is_not_taken_for_smoothed_labels(times: float) -> None:
    """With uniform predictions p, k (p − y) is p − y' with y' = (1 − k) p + k y: labels smoothed alike."""
    f = 1e-3 * torch.randn(8, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = torch.eye(5, dtype=torch.float64)[torch.arange(8) % 5]
    weight = torch.full((8,), 1 / 8, dtype=torch.float64)
    assert loss_of(f, times * (f.softmax(1) - y) / 8, weight) is None
    told = loss_of(f, (f.softmax(1) - y) / 8, weight)
    assert told is not None
    assert told.kind == "cross-entropy"


def test_a_run_with_a_curvature_of_its_own_is_not_resumed_by_default_settings(tmp_path: Path) -> None:
    model = mlp()
    training(tmp_path / "run", model, sgd(model), 6, curvature="empirical")
    with pytest.raises(MismatchError, match="curvature: 'empirical' in the run, 'auto' now"):
        training(tmp_path / "run", model, sgd(model), 9, start=6)


@pytest.mark.parametrize("start", [0, 1, 2, 5, 9])
def test_a_run_that_goes_on_keeps_what_was_decided(start: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    model, states = three(), list[Any]()
    training(tmp_path / "whole", model, sgd(model), states=states)
    model = three()
    optimizer = sgd(model)
    with pytest.raises(Interrupted), backstory.record(model, optimizer, tmp_path / "run", **AUTO) as rec:
        for t in range(10 if start > 4 else 7):  # no more than the window before waits
            x, y = batch_of(ids_of(t, SIZE))
            optimizer.zero_grad()
            with rec.step(ids_of(t, SIZE)):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
        raise Interrupted
    model = three()
    optimizer = sgd(model)
    restore(states[start], model, optimizer)
    training(tmp_path / "run", model, optimizer, start=start)
    assert RunStore.open(tmp_path / "run").config["settings"]["curvature"] == "ggn:1"
    same_windows(tmp_path / "run", tmp_path / "whole")
    assert torch.equal(own_of(tmp_path / "run"), own_of(tmp_path / "whole"))


def test_outputs_that_are_passed_all_the_same_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    for name in ("told", "untold"):
        model = three()
        tell = (lambda t, s, out: s.outputs(out, kind="cross-entropy")) if name == "told" else (lambda t, s, out: None)
        training(tmp_path / name, model, sgd(model), inside=tell)
    same_windows(tmp_path / "told", tmp_path / "untold")
    assert RunStore.open(tmp_path / "told").config["settings"]["curvature"] == "ggn:1"


def test_the_first_window_has_curvature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large batches: one step of a window has rows enough."""
    budget(monkeypatch, SIZE)
    model = three()
    training(tmp_path / "run", model, sgd(model), 9)
    assert [len(w.V) > 0 for w in windows_of(tmp_path / "run").values()] == [True, True, True]


@pytest.mark.parametrize("maximize", [False, True])
def test_a_loss_that_is_ascended_curves_the_other_way(maximize: bool, tmp_path: Path) -> None:
    """Its Gauss-Newton matrix is that of the loss; the step's has the other sign."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, maximize=maximize)
    with backstory.record(model, optimizer, tmp_path / "run", **AUTO) as rec:
        for t in range(4):
            x, y = batch_of(ids_of(t))
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
    config = backstory.open(tmp_path / "run").config
    assert (config["outputs"] is None) == maximize
    assert config["settings"]["curvature"] == ("empirical" if maximize else "ggn:1")
