"""Segments against one sweep and against the adjoint: any number of them, any number of workers, at every checkpoint."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import batch_of, cross_entropy, ids_of, mlp, normal, same_report, sgd, terms_of, train
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import StoreError, UsageError
from backstory.run import segments
from backstory.run.embed import Form
from backstory.run.run import Run
from backstory.run.segments import boundaries

STEPS = 9
EXACT: dict[str, Any] = {"dtype": torch.float64, "encoding": "float64"}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, betas=(0.8, 0.9), weight_decay=0.1)


RUNS: dict[str, Any] = {
    "sgd": (lambda m: sgd(m, 0.3), {"projection": "full"}, None),
    "sgd, clipped": (lambda m: sgd(m, 0.3), {"projection": "full"}, 0.1),
    "momentum": (lambda m: sgd(m, 0.1, momentum=0.9, weight_decay=0.1), {"projection": "full"}, 0.1),
    "nesterov": (lambda m: sgd(m, 0.1, momentum=0.9, nesterov=True), {"projection": "random", "rank": 2}, None),
    "adamw, diagonal": (adamw, {"projection": "full"}, None),
    "adamw, learned": (adamw, {"projection": "learned", "rank": 2, "warmup_steps": 3}, 0.1),
}


def recorded(name: str, path: Path) -> Run:
    make, settings, max_norm = RUNS[name]
    model = mlp()
    optimizer = make(model)
    told = {"loss_reduction": "mean", "encoding": "float64", "steps": STEPS, "checkpoints": 2, **settings}
    with backstory.record(model, optimizer, path, **told) as rec:
        for t in range(STEPS):
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
    return backstory.open(path)


def queries(run: Run) -> Tensor:
    return normal(2, run.width, seed=3)


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 3, pytest.param(9, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", RUNS)
def test_segments_are_one_sweep_at_every_checkpoint(name: str, count: int, per_layer: bool, tmp_path: Path) -> None:
    run = recorded(name, tmp_path / "run")
    v = queries(run)
    assert run.checkpoints == [0, 3, 6, 9]
    run.embed(segments=count, per_layer=per_layer, **EXACT)
    for at in (3, 6, 9):
        answer = run.query_gradients(v, at, per_layer=per_layer)
        assert answer.method == "segments"
        assert_close(answer.scores, run.query_gradients(v, at, per_layer=per_layer, method="adjoint").scores, 1e-10)
        composed = run.embeddings(at, per_layer=per_layer)
        run.embed(at, per_layer=per_layer, **EXACT)  # a fresh sweep that ends there
        fresh = run._store.read_embeddings(at, 0, 3 * at, dtype=torch.float64)
        assert_close(composed, fresh.float(), 1e-5)
        assert_close(v @ fresh.T, answer.scores, 1e-10)


def test_without_m_a_checkpoint_in_between_would_be_wrong(tmp_path: Path) -> None:
    """Scores from e^θ alone, carried by A alone, are far from the truth: the test above can fail."""
    run = recorded("momentum", tmp_path / "run")
    v = queries(run)
    run.embed(segments=3, **EXACT)
    truth = run.query_gradients(v, method="adjoint").scores
    p = run.width
    early = run._store.read_segment((0, 3), 0, 9, dtype=torch.float64)[:, :p]
    for span in ((3, 6), (6, 9)):
        early = early @ run._store.segment_propagator(span)["0000"][:p, :p].T
    error = (v @ early.T - truth[:, :9]).norm() / truth[:, :9].norm()
    assert error > 0.2


def test_workers_and_their_number_change_nothing(tmp_path: Path) -> None:
    run = recorded("momentum", tmp_path / "run")
    run.embed(segments=4, **EXACT)
    spans = sorted(run._store.segments())
    alone = {span: run._store.read_segment(span, 0, 3 * (span[1] - span[0]), dtype=torch.float64) for span in spans}
    run = recorded("momentum", tmp_path / "again")
    report = run.embed(segments=4, workers=2, **EXACT)
    assert (report.segments, report.occurrences) == (4, 3 * STEPS)
    assert sorted(run._store.segments()) == spans
    for span, E in alone.items():
        assert_same(run._store.read_segment(span, 0, len(E), dtype=torch.float64), E, terms_of(mlp(), STEPS))


def killed_once(path: Path, span: tuple[int, int], plan: Any, momentum: bool) -> None:
    """The worker of the second segment is killed in the middle of its work, the first time."""
    marker = path.parent / "was killed"
    if span[0] == 3 and not marker.exists():
        marker.touch()
        store = backstory.store.RunStore.open(path)
        half = iter([(15, torch.zeros(3, 2 * store.width, dtype=torch.float64))])

        def blocks() -> Iterator[tuple[int, Tensor]]:
            yield from half
            os.kill(os.getpid(), signal.SIGKILL)

        store.write_segment(span, blocks(), dict, {"parts": 2}, "float64")
    segments.compute(path, span, plan, momentum)


def always_killed(path: Path, span: tuple[int, int], plan: Any, momentum: bool) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_is_killed_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded("momentum", tmp_path / "run")
    expected = run.query_gradients(queries(run), method="adjoint").scores
    monkeypatch.setattr(segments, "_work", killed_once)
    run.embed(segments=3, workers=2, **EXACT)
    assert (tmp_path / "was killed").exists()
    assert_close(run.query_gradients(queries(run)).scores, expected, 1e-10)
    assert not run._store.verify()


@pytest.mark.slow
def test_workers_that_always_die_leave_what_is_complete_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded("sgd", tmp_path / "run")
    run.embed(3, segments=1, **EXACT)
    monkeypatch.setattr(segments, "_work", always_killed)
    with pytest.raises(StoreError, match=r"2 of 3 segments are missing.*fewer workers"):
        run.embed(segments=3, workers=2, **EXACT)
    assert sorted(run._store.segments()) == [(0, 3)]
    monkeypatch.undo()
    done: list[tuple[int, int]] = []
    run.embed(segments=3, progress=lambda a, b: done.append((a, b)), **EXACT)
    assert done == [(2, 3), (3, 3)], "the complete one is not computed again"


def test_a_death_between_two_forms_of_a_segment_leaves_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The propagator of one form beside the embeddings of another would answer wrongly and look sound."""
    run = recorded("sgd", tmp_path / "run")
    run.embed(segments=3, **EXACT)

    def full(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr("backstory.store.embeddings.write_json", full)
        with pytest.raises(OSError, match="no space"):
            run.embed(segments=3, contraction="never", **EXACT)
    assert len(backstory.open(run.path)._store.segments()) == 2
    answer = backstory.open(run.path).query_gradients(queries(run))
    assert answer.method == "adjoint"
    backstory.store.RunStore.open(run.path, write=True).close()
    assert len(list(run.path.glob("seg-*.safetensors"))) == 2, "what was interrupted is swept away"


def test_segments_cut_otherwise_do_not_hide_a_complete_path(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    v = queries(run)
    run.embed(segments=3, **EXACT)
    expected = run.query_gradients(v).scores
    segments.compute(run.path, (7, 9), Form(False, "when_expanding", "float64", "float64"), False)
    run = backstory.open(run.path)
    assert (7, 9) in run._store.segments()
    told: list[tuple[int, int]] = []
    answer = run.query_gradients(v, progress=lambda done, total: told.append((done, total)))
    assert answer.method == "segments"
    assert_close(answer.scores, expected, 1e-12)
    assert told == [(9, 27), (18, 27), (27, 27)]


def test_numbers_of_segments_and_workers_are_checked(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    cases: list[dict[str, Any]] = [{"segments": 0}, {"workers": 0}]
    for wrong in cases:
        name = next(iter(wrong))
        with pytest.raises(UsageError, match=f"{name} must be .*, got 0"):
            run.embed(**wrong)
    for bad in ({"segments": 2.5}, {"workers": 1.5}, {"segments": "4"}, {"workers": True}):
        with pytest.raises(UsageError, match=r"(segments|workers) must be an integer, got"):
            run.embed(**bad)
    assert not run._store.embeddings()
    assert not run._store.segments()


def test_boundaries_are_checkpoints_and_about_equal(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    assert boundaries(run._store, 9, 1) == [(0, 3), (3, 6), (6, 9)]
    four = boundaries(run._store, 9, 4)
    assert len(four) == 4
    assert {hi for _, hi in four} >= {3, 6, 9}
    assert boundaries(run._store, 9, 9) == [(t, t + 1) for t in range(9)]
    for wrong in (0, 10):
        with pytest.raises(UsageError, match=f"segments must be between 1 and 9, the number of steps, got {wrong}"):
            boundaries(run._store, 9, wrong)


def test_segments_of_another_form_are_not_used(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    run.embed(segments=3, contraction="never", **EXACT)
    v = queries(run)
    assert run.query_gradients(v).method == "adjoint"
    assert run.query_gradients(v, contraction="never").method == "segments"
    assert run.query_gradients(v, 5, contraction="never").method == "adjoint", "no segment ends at step 5"
    with pytest.raises(UsageError, match=r"Call run\.embed"):
        run.embeddings(5, contraction="never")


def test_the_report_is_that_of_one_sweep(tmp_path: Path) -> None:
    run = recorded("momentum", tmp_path / "run")
    v = queries(run)
    whole = run.query_gradients(v, method="adjoint").recording
    run.embed(segments=3, **EXACT)
    same_report(run.query_gradients(v).recording, whole)


def test_training_on_drops_later_segments_only(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    run.embed(segments=3, **EXACT)
    with backstory.store.RunStore.open(run.path, write=True) as store:
        store.truncate(7)
        assert sorted(store.segments()) == [(0, 3), (3, 6)]


def test_the_command_line(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from backstory.cli.app import app

    model = mlp()
    train(tmp_path / "run", model, sgd(model), 4)
    actual = CliRunner().invoke(app, ["embed", str(tmp_path / "run"), "--segments", "2"])
    assert actual.exit_code == 0, actual.output
    assert "2 segments" in " ".join(actual.output.split())
    answer = backstory.open(tmp_path / "run").query(model, cross_entropy, batch_of([20]))
    assert answer.method == "segments"
