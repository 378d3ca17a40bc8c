"""Recorded windows against one backward pass for each sample, queries on them, and runs that were interrupted."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.recording import windows_script
from tests.support.adam import Seen, Tiny, adamw, group_rows, met, projected, second_moments
from tests.support.loops import (
    Batch,
    Interrupted,
    Losses,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    normal,
    one_backward_each,
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
from backstory.errors import StoreError
from backstory.recording import settings as settings_module
from backstory.recording.settings import Curvature, Exact, GaussNewton, Sampled
from backstory.store import RunStore
from backstory.store.windows import Window

pytestmark = pytest.mark.usefixtures("scales_of_each_step")
STEPS, SIZE = 11, 3
WINDOW = 4  # steps of a window, of which two are seen
LEARNED: dict[str, Any] = {"projection": "learned", "rank": 2, "warmup_steps": 3}
SHARED: dict[str, Any] = {"curvature_of": "windows", "encoding": "float64"}
EXACT: dict[str, Any] = {"dtype": torch.float64, "encoding": "float64"}


def sequences(ids: Sequence[int]) -> Batch:
    return (torch.stack([torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(i)) for i in ids]),)


def of_tokens(model: nn.Module, batch: Batch) -> Tensor:
    """ℓ of each sequence, a sum over its four next tokens."""
    return F.cross_entropy(model(batch[0])[:, :-1].mT, batch[0][:, 1:], reduction="none").sum(1)


def budget(monkeypatch: pytest.MonkeyPatch, rows: int, fewest: int = WINDOW) -> None:
    """How many rows a window is made of."""
    monkeypatch.setattr(settings_module, "SEEN", 1)
    for kind in (Curvature, Sampled, Exact, GaussNewton):
        monkeypatch.setattr(kind, "wanted", property(lambda self: (fewest, 32, rows)))


def training(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = STEPS,
    *,
    losses: Losses = cross_entropy,
    batch: Callable[[Sequence[int]], Batch] = batch_of,
    tokens: int = 1,
    groups: int = 1,
    micro: int = 1,
    max_norm: float | None = None,
    start: int = 0,
    stop: int | None = None,
    states: list[dict[str, Any]] | None = None,
    planned: int | None = None,
    look: bool = True,
    **settings: Any,
) -> list[Seen]:
    """A recorded loop and, where somebody looks, what each of its steps truly was; step `stop` fails."""
    seen, names = [], trained_names(model)
    settings = {"loss_reduction": "token-mean" if tokens > 1 else "mean", **SHARED, **LEARNED, **settings}
    settings |= {"steps": planned, **({"resume": True, "start": start} if start else {})}
    with (
        nullcontext() if stop is None else pytest.raises(Interrupted),
        backstory.record(model, optimizer, path, **settings) as rec,
    ):
        for t in range(start, steps):
            ids = ids_of(t, SIZE)
            if states is not None:
                states.append(snapshot(model, optimizer))
            if look:
                rows = one_backward_each(model, batch(ids), losses, names)
                apart = group_rows(model, batch(ids), losses, names, groups) if groups > 1 else rows[:, None]
            optimizer.zero_grad()
            with rec.step() as s:
                for part in torch.tensor(ids).chunk(micro):
                    s.batch(part, tokens=[tokens] * len(part) if tokens > 1 else None)
                    (losses(model, batch(part.tolist())).sum() / (SIZE * tokens)).backward()
                if t == stop:
                    raise Interrupted
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
            if look:
                ones = torch.ones(rows.shape[1], dtype=torch.float64)
                half = second_moments(model, optimizer) if isinstance(optimizer, torch.optim.Adam) else (ones, ones)
                seen.append(Seen(rows, apart, rows.sum(0) / (SIZE * tokens), *half))
    return seen


def windows_of(path: Path) -> dict[tuple[int, int], Window]:
    store = RunStore.open(path)
    return {span: store.windows.read(span, torch.float64) for span in store.windows.spans(store.n_steps())}


def same_windows(a: Path, b: Path, rtol: float = 0.0) -> None:
    one, two = windows_of(a), windows_of(b)
    assert list(one) == list(two)
    for span, (V, d) in one.items():
        W, e = two[span]
        assert (d is None) == (e is None)
        if rtol:
            assert_close(V.T @ V, W.T @ W, rtol)
        else:
            assert torch.equal(V, W), span
        if d is not None and e is not None:
            assert_close(d, e, max(rtol, 1e-300)) if rtol else torch.testing.assert_close(d, e, rtol=0, atol=0)


def is_seen(t: int) -> bool:
    """Two of four: the first and the third."""
    return t % 2 == 0


def check_means(path: Path, model: nn.Module, seen: Sequence[Seen], kappa: float) -> None:
    """VᵀV of each window is the mean over its seen steps of Σ κ h hᵀ in the run's coordinates."""
    windows = windows_of(path)
    assert list(windows) == [(0, 4), (4, 8), (8, 11)]
    for (lo, hi), (V, _) in windows.items():
        rows = [
            projected(seen[t].pieces * seen[t].half, model, path).flatten(0, 1) for t in range(lo, hi) if is_seen(t)
        ]
        expected = torch.stack([kappa * h.T @ h for h in rows]).mean(0)
        assert_close(V.T @ V, expected, 1e-9, f"steps {lo} to {hi}")


CASES: dict[str, tuple[Callable[[nn.Module], torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (sgd, {}),
    "momentum, clipped": (lambda m: sgd(m, momentum=0.9), {"max_norm": 0.1}),
    "momentum, whole": (lambda m: sgd(m, momentum=0.9), {"projection": "full"}),
    "adamw": (adamw, {}),
    "adamw, clipped": (adamw, {"max_norm": 0.1}),
    "adamw, own diagonal": (adamw, {"projection": "full", "max_norm": 0.1}),
    "adamw, random": (adamw, {"projection": "random"}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_window_is_the_mean_of_its_seen_steps(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    make, settings = CASES[case]
    model = mlp()
    seen = training(tmp_path / "run", model, make(model), curvature="empirical", **settings)
    if settings.get("projection") != "full":
        check_means(tmp_path / "run", model, seen, 1 / SIZE)
        return
    whole = [s._replace(half=torch.ones_like(s.half)) for s in seen]  # P is kept beside the rows
    check_means(tmp_path / "run", model, whole, 1 / SIZE)


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("case", ["momentum, clipped", "adamw, clipped"])
def test_a_window_of_sequences_has_rows_of_position_groups(
    case: str, micro: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget(monkeypatch, 2 * SIZE * 2)
    make, settings = CASES[case]
    model = seeded(Tiny())
    text: dict[str, Any] = {"losses": of_tokens, "batch": sequences, "tokens": 4, "groups": 2, "micro": micro}
    seen = training(tmp_path / "run", model, make(model), curvature="empirical/2", **text, **settings)
    check_means(tmp_path / "run", model, seen, 1 / (4 * SIZE))
    assert (stored(tmp_path / "run").table.clip < 1).all()


def test_the_default_for_tokens_has_six_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE * 6)
    model = seeded(Tiny())
    text: dict[str, Any] = {"losses": of_tokens, "batch": sequences, "tokens": 4, "groups": 6}
    auto: dict[str, Any] = {"curvature_of": "auto", "encoding": "float64"}
    seen = training(tmp_path / "run", model, sgd(model), **text, **auto)
    check_means(tmp_path / "run", model, seen, 1 / (4 * SIZE))


@pytest.mark.parametrize("groups", [1, 2])
def test_clipped_steps_in_adams_coordinates_know_the_gradient(
    groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """⟨h, d⟩ = ⟨h, ∇L⟩ for the rows of a step, to the millionth that is added where d is solved for; seen or not."""
    budget(monkeypatch, 2 * SIZE * groups)
    model, path = seeded(Tiny()), tmp_path / "run"
    text: dict[str, Any] = {"losses": of_tokens, "batch": sequences, "tokens": 4, "groups": groups, "max_norm": 0.1}
    form = "empirical/2" if groups > 1 else "empirical"
    seen = training(path, model, adamw(model), curvature=form, **text)
    d = torch.cat([w.d for w in windows_of(path).values() if w.d is not None])
    assert len(d) == STEPS
    for t, s in enumerate(seen):
        met_rows = s.pieces if is_seen(t) else s.rows[:, None]
        h = projected(met_rows * s.half, model, path).flatten(0, 1)
        expected = met(met_rows, s, t, model, path).flatten()
        assert_close(h @ d[t], expected, 5e-3, f"step {t}")


def test_unclipped_steps_and_raw_coordinates_keep_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    for name, case in {"free": "adamw", "raw": "momentum, clipped"}.items():
        make, settings = CASES[case]
        model = mlp()
        training(tmp_path / name, model, make(model), curvature="empirical", look=False, **settings)
        assert all(w.d is None for w in windows_of(tmp_path / name).values())


@pytest.mark.parametrize("case", ["momentum, clipped", "adamw, clipped"])
def test_micro_batches_give_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    make, settings = CASES[case]
    for name, micro in {"whole": 1, "parts": 3}.items():
        model = mlp()
        training(tmp_path / name, model, make(model), micro=micro, curvature="empirical", look=False, **settings)
    same_windows(tmp_path / "whole", tmp_path / "parts", rtol=1e-6)


@pytest.mark.parametrize(("planned", "lengths"), [(None, {4}), (200, {7}), (40, {4})])
def test_windows_follow_the_planned_steps(
    planned: int | None, lengths: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 32 windows where the run's length is known; they grow where it is not."""
    budget(monkeypatch, 2 * SIZE)
    model = mlp()
    training(tmp_path / "run", model, sgd(model), 2, curvature="empirical", look=False, planned=planned)
    grid = RunStore.open(tmp_path / "run").grid
    assert grid is not None
    assert {grid.first} == lengths
    assert grid.growing == (planned is None)
    assert grid.seen == 2


# queries


@pytest.mark.parametrize("at", [STEPS, 6])
@pytest.mark.parametrize("case", ["momentum, clipped", "adamw, clipped", "adamw, own diagonal"])
def test_all_ways_to_ask_agree(case: str, at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    make, settings = CASES[case]
    model = mlp()
    training(tmp_path / "run", model, make(model), curvature="empirical", look=False, **settings)
    run = backstory.open(tmp_path / "run")
    v = normal(2, run.width, seed=3)
    expected = run.query_gradients(v, at, method="adjoint").scores
    run.embed(at, **EXACT)
    assert_close(run.query_gradients(v, at, method="embeddings").scores, expected, 1e-9)
    run.embed(segments=3, **EXACT)
    assert_close(run.query_gradients(v, 5).scores, run.query_gradients(v, 5, method="adjoint").scores, 1e-9)


@pytest.mark.parametrize("case", ["momentum, clipped", "adamw, clipped"])
def test_where_all_steps_are_seen_it_is_the_compressed_run(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run keeps the curvature of every occurrence, and windows are made of it afterwards."""
    budget(monkeypatch, 10_000)
    make, settings = CASES[case]
    text: dict[str, Any] = {"losses": of_tokens, "batch": sequences, "tokens": 4, "look": False, **settings}
    for name, of in {"windows": "windows", "steps": "steps"}.items():
        model = seeded(Tiny())
        training(tmp_path / name, model, make(model), 8, curvature="empirical/2", curvature_of=of, **text)
    backstory.open(tmp_path / "steps").compress(tmp_path / "small", rank=None, windows=2)
    one, two = backstory.open(tmp_path / "windows"), backstory.open(tmp_path / "small")
    assert [*windows_of(one.path)] == [*windows_of(two.path)] == [(0, 4), (4, 8)]
    same_windows(one.path, two.path, rtol=1e-6)
    v = normal(2, one.width, seed=3)
    assert_close(one.query_gradients(v).scores, two.query_gradients(v).scores, 1e-6)


def test_a_run_is_asked_while_it_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    model = mlp()
    optimizer = sgd(model)
    asked = []
    settings = {"loss_reduction": "mean", "curvature": "empirical", **SHARED, **LEARNED}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        for t in range(10):
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                optimizer.step()
            if t in (5, 7):
                rec.flush()
                run = backstory.open(tmp_path / "run")
                asked.append(run.query_gradients(normal(1, run.width, seed=2), method="adjoint").scores)
    assert [x.shape[-1] for x in asked] == [18, 24]
    for n, scores in zip((6, 8), asked, strict=True):
        other = mlp()
        training(tmp_path / f"{n}", other, sgd(other), n, curvature="empirical", look=False)
        run = backstory.open(tmp_path / f"{n}")
        assert_close(scores, run.query_gradients(normal(1, run.width, seed=2), method="adjoint").scores, 1e-10)


def test_a_missing_window_is_told_by_the_query_that_needs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget(monkeypatch, 2 * SIZE)
    model = mlp()
    training(tmp_path / "run", model, sgd(model), curvature="empirical", look=False)
    (tmp_path / "run" / "curvature-00000000-00000004.safetensors").unlink()
    run = backstory.open(tmp_path / "run")
    with pytest.raises(StoreError, match="the curvature of step 0 is missing"):
        run.query_gradients(normal(1, run.width), method="adjoint")


# interruptions


@pytest.mark.parametrize("stop", [2, 4, 5, 6, 8, 9, 10])
@pytest.mark.parametrize("text", [False, True], ids=["classes", "tokens"])
def test_a_run_that_goes_on_equals_an_undisturbed_one(
    stop: int, text: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the warm-up, in an open window, and between two: bit for bit."""
    budget(monkeypatch, 2 * SIZE * (2 if text else 1))
    of_text = {"losses": of_tokens, "batch": sequences, "tokens": 4, "groups": 2, "curvature": "empirical/2"}
    more: dict[str, Any] = {"look": False, **(of_text if text else {"curvature": "empirical"})}

    def make() -> nn.Module:
        return seeded(Tiny()) if text else mlp()

    model = make()
    training(tmp_path / "whole", model, sgd(model), **more)
    model, states = make(), list[dict[str, Any]]()
    training(tmp_path / "run", model, sgd(model), stop=stop, states=states, **more)
    model = make()
    optimizer = sgd(model)
    restore(states[stop], model, optimizer)
    training(tmp_path / "run", model, optimizer, start=stop, **more)
    same_windows(tmp_path / "run", tmp_path / "whole")
    assert torch.equal(stored(tmp_path / "run").rows, stored(tmp_path / "whole").rows)
    assert RunStore.open(tmp_path / "run").verify() == []


@pytest.mark.parametrize("ended", [9, 10])
def test_a_run_that_ended_can_be_trained_on(ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last window was closed early and stays as it is; rows are those of an undisturbed run."""
    budget(monkeypatch, 2 * SIZE)
    model, states, path = mlp(), list[dict[str, Any]](), tmp_path / "run"
    seen = training(tmp_path / "whole", model, sgd(model), curvature="empirical", states=states)
    model = mlp()
    training(path, model, sgd(model), ended, curvature="empirical", look=False)
    assert waiting(path) == []
    model = mlp()
    optimizer = sgd(model)
    restore(states[ended], model, optimizer)
    training(path, model, optimizer, curvature="empirical", look=False, start=ended)
    assert torch.equal(stored(path).rows, stored(tmp_path / "whole").rows)
    windows = windows_of(path)
    assert list(windows) == [(0, 4), (4, 8), (8, ended), (ended, 11)]
    for lo, hi in ((8, ended), (ended, 11)):
        rows = [projected(seen[t].rows, model, path) for t in range(lo, hi) if is_seen(t)]
        expected = torch.stack([h.T @ h / SIZE for h in rows]).mean(0)
        assert_close(windows[lo, hi].V.T @ windows[lo, hi].V, expected, 1e-9)
    assert RunStore.open(path).verify() == []


def test_steps_after_a_cut_have_curvature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that ended and goes on before the next seen step of its window."""
    budget(monkeypatch, SIZE)  # one step of four
    model, states = mlp(), list[dict[str, Any]]()
    training(tmp_path / "run", model, sgd(model), 9, curvature="empirical", look=False)
    training(tmp_path / "run", model, sgd(model), 12, curvature="empirical", look=False, start=9, states=states)
    for span, (V, _) in windows_of(tmp_path / "run").items():
        assert len(V), span


def waiting(path: Path) -> list[str]:
    return sorted(x.name for x in (path / "window").iterdir())


@pytest.mark.parametrize(
    ("kills", "seed"), [(2, 1), pytest.param(12, 2, marks=pytest.mark.slow)], ids=["2 kills", "12 kills"]
)
def test_a_run_that_was_killed_at_its_commits_equals_an_undisturbed_one(
    kills: int, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, own, luck = tmp_path / "run", tmp_path / "own.pt", random.Random(seed)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{Path(backstory.__path__[0]).parent}{os.pathsep}{root}"}
    for _ in range(kills):
        command = [sys.executable, windows_script.__file__, str(run), str(own), str(luck.randint(4, 9))]
        killed = subprocess.run(command, capture_output=True, env=environment, timeout=90)
        assert killed.returncode in (0, -signal.SIGKILL), killed.stderr.decode()
        assert RunStore.open(run).verify() == []
    monkeypatch.setattr(Curvature, "wanted", Curvature.wanted)  # the script sets its own
    windows_script.main(run, own, 0)
    windows_script.main(tmp_path / "whole", tmp_path / "other.pt", 0)
    same_windows(run, tmp_path / "whole")
    assert len(windows_of(run)) == 6
    assert RunStore.open(run).verify() == []
