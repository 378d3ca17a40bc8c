"""Tangents of a recorded run's groups: against the reverse sweep and each other, stored, read again, and continued."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.run.test_left_out import normalised
from tests.support import examples
from tests.support.oracles import assert_close, assert_same
from torch import Tensor

import backstory
from backstory.errors import UsageError
from backstory.exact.tangent import Group, Tangents, tangent
from backstory.results import GroupEffects, MoveEffects
from backstory.run import pieces
from backstory.run.groups import grouped
from backstory.run.run import Run

ARGS: dict[str, Any] = {"optimizer": "adamw", "clip": 0.15, "schedule": True, "dropout": 0.4}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return with_sources(tmp_path_factory.mktemp("tangents") / "run")


def with_sources(path: Path) -> Run:
    run = recorded(path, **ARGS)
    run.describe(range(examples.N), source=["abc"[i % 3] for i in range(examples.N)])
    return run


def effects(changes: Any, at: int | str = "all") -> GroupEffects:
    recipe = examples.make(**ARGS)
    result: GroupEffects = changes.effects(recipe.model, recipe.loss, recipe.queries["q"], at)
    return result


def test_groups_add_up_to_the_reverse_scores(run: Run) -> None:
    result = effects(run.tangents("source,parts:4", examples.NAME), "final")
    scores = run.exact("q", examples.NAME, each=True).scores
    groups = grouped(run, "source,parts:4")
    for g in range(len(result.groups)):
        assert_close(result.values[g, 0], scores[:, torch.from_numpy(groups.of == g)].sum(1), rtol=1e-10)
    whole = effects(run.tangents({"all": range(examples.N)}, examples.NAME), "final")
    size = float(result.values.abs().sum(0).max())
    assert_same(result.values.sum(0), whole.values[0], 9 * examples.TERMS, size=size)
    for words in ("first order", "add up", "reproduces the run"):
        assert any(words in x for x in result.caveats), words
    assert result.floor is None


def test_earlier_checkpoints_equal_a_shorter_run(run: Run) -> None:
    result = effects(run.tangents("source,parts:4", examples.NAME))
    assert len(result.checkpoints) > 1
    for c, step in enumerate(result.checkpoints):
        scores = run.exact("q", examples.NAME, at=step, each=True, check=False).scores
        of = torch.from_numpy(grouped(run, "source,parts:4").of[: scores.shape[1]])
        for g in range(len(result.groups)):
            expected = scores[:, of == g].sum(1)
            assert_same(result.values[g, c], expected, 9 * examples.TERMS, size=max(1.0, float(scores.abs().max())))


def test_single_samples_and_what_if_they_had_come_later(run: Run) -> None:
    sample, step = first_use(run)
    recipe = examples.make(**ARGS)
    alone = effects(run.tangents({"one": [sample]}, examples.NAME), "final")
    assert (alone.groups, alone.samples) == (("one",), (1,))
    moved = run.move([sample], 7, examples.NAME, steps=[step])
    group = Group({step: [0]}, {7: [(step, 0)]})
    expected = tangent(examples.NAME, [group], args=ARGS)[8][0]
    names = [n for p in parameters(recipe) for n, q in recipe.model.named_parameters() if p is q]
    actual = moved.change(f"sample {sample}, moved to step 7")
    assert_same(flat(actual, names), expected, 9 * examples.TERMS, size=max(1.0, float(expected.abs().max())))
    result = effects(moved)
    assert isinstance(result, MoveEffects)
    assert "they did better where they were" in result.sign
    assert result.first_steps == (step,)
    with pytest.raises(UsageError, match="a step of the run, 0 to 7"):
        run.move([sample], 8, examples.NAME)
    with pytest.raises(UsageError, match="nothing to move"):
        run.move([sample], step, examples.NAME, steps=[step])


def first_use(run: Run) -> tuple[int, int]:
    ids, steps = run.occurrences()
    row = int((steps == 1).argmax())
    return int(ids[row]), 1


def parameters(recipe: Any) -> list[Tensor]:
    return [p for group in recipe.optimizer.param_groups for p in group["params"]]


def flat(change: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([change[name].reshape(-1) for name in names])


def test_what_is_stored_is_not_computed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = effects(run.tangents("source,parts:4", examples.NAME))

    def over(*_: object) -> None:
        raise AssertionError("it is computed again")

    monkeypatch.setattr(Tangents, "over", over)
    again = effects(backstory.open(run.path).tangents("source,parts:4"))
    assert torch.equal(first.values, again.values)
    assert first.caveats == again.caveats
    with pytest.raises(UsageError, match="not stored in the run yet"):
        run.tangents("epoch")
    assert {x.kind for x in run.weight_changes()} >= {"tangent"}


def test_an_interrupted_call_goes_on(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    other, steps, original = with_sources(tmp_path / "run"), list[int](), Tangents.over

    def over(carried: Tangents, t: int) -> None:
        steps.append(t)
        if len(steps) == 6:
            raise KeyboardInterrupt
        original(carried, t)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Tangents, "over", over)
        other.tangents("source", examples.NAME)
    work = other.path / pieces.WORK
    assert len(list(work.glob("tangent-*.safetensors"))) == 1
    (work / f"{next(work.glob('tangent-*')).name}.tmp").write_bytes(b"half of a file")
    steps = [-1] * 99
    monkeypatch.setattr(Tangents, "over", over)
    actual = effects(other.tangents("source", examples.NAME))
    assert steps[99:] == [5, 6, 7]
    expected = effects(run.tangents("source", examples.NAME)).values
    assert_same(actual.values, expected, 9 * examples.TERMS, size=max(1.0, float(expected.abs().max())))
    assert not work.exists()


def test_blocks_of_workers_make_the_whole(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "spread", lambda work, jobs, workers: ((i, work(*x)) for i, x in enumerate(jobs)))
    seen: list[tuple[int, int]] = []
    other = with_sources(tmp_path / "run")
    changes = other.tangents("source,parts:4", examples.NAME, workers=3, progress=lambda a, b: seen.append((a, b)))
    expected = effects(run.tangents("source,parts:4", examples.NAME)).values
    assert_same(effects(changes).values, expected, 9 * examples.TERMS, size=max(1.0, float(expected.abs().max())))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_statistics_that_training_keeps_are_named(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", make=normalised), normalised()
    changes = run.tangents({"x": [1]}, normalised, check=False)
    result = changes.effects(recipe.model, recipe.loss, recipe.queries["q"])
    assert any("running statistics" in x for x in result.caveats)
    assert "1.mean" not in changes.change("x")
