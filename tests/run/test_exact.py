"""Exact results of a recorded run: against the reverse sweep itself, stored, read again, and continued."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples
from tests.support.oracles import assert_same

import backstory
from backstory import Recipe
from backstory.errors import MismatchError, StoreError, UsageError
from backstory.exact.losses import QuerySet
from backstory.exact.reverse import Sweep, reverse
from backstory.run import pieces
from backstory.run.run import Run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return recorded(tmp_path_factory.mktemp("exact") / "run", optimizer="momentum", clip=0.3, dropout=0.4)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that are gone back over from now on."""
    steps: list[int] = []
    original = Sweep._step_back

    def back(sweep: Sweep, t: int, x: Any) -> Any:
        steps.append(t)
        return original(sweep, t, x)

    monkeypatch.setattr(Sweep, "_step_back", back)
    return steps


def test_the_mean_of_a_set_is_one_query(run: Run) -> None:
    actual = run.exact("q", examples.NAME)
    expected = reverse(examples.NAME, QuerySet("q", mean=True), args=run.config["recipe_args"])
    assert_same(actual.scores, expected.scores, 3 * examples.TERMS, size=1.0)
    assert actual.method == "exact unrolling"
    assert actual.sample_ids.tolist() == expected.sample_ids.tolist()
    assert actual.steps.tolist() == expected.steps.tolist()
    assert "the replay reproduces the run" in actual.caveats[0]
    assert "influence on the mean loss of 3 queries" in actual.caveats


def test_each_query_and_one_by_its_index(run: Run) -> None:
    actual = run.exact("q", examples.NAME, each=True)
    expected = reverse(examples.NAME, "q", args=run.config["recipe_args"])
    assert_same(actual.scores, expected.scores, 3 * examples.TERMS, size=1.0)
    one = run.exact("q:1", examples.NAME)
    assert torch.equal(one.scores[0], actual.scores[1]), "it was stored by the call before"
    assert {r.query for r in run.exact_results()} >= {"q:0", "q:1", "q:2"}


def test_what_is_stored_is_not_computed_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run.exact("q:2", examples.NAME, since=3)
    steps = counted(monkeypatch)
    again = backstory.open(run.path).exact("q:2", examples.NAME, since=3)
    assert not steps
    assert torch.equal(first.scores, again.scores)
    assert again.caveats == first.caveats
    assert min(again.steps) == 3
    assert "steps 3 to 7 only" in again.caveats
    run.exact("q:2", examples.NAME, since=4)
    assert min(steps) == 4


def test_an_earlier_model(run: Run) -> None:
    actual = run.exact("q", examples.NAME, at=4, check=False)
    assert (actual.at, max(actual.steps)) == (4, 3)
    assert "the replay reproduces the run" in actual.caveats[0]


def test_a_killed_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "run")
    expected = reverse(examples.NAME, "q", args=run.config["recipe_args"]).scores
    original, steps = Sweep._step_back, list[int]()

    def back(sweep: Sweep, t: int, x: Any) -> Any:
        if len(steps) == 5:
            raise KeyboardInterrupt
        steps.append(t)
        return original(sweep, t, x)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Sweep, "_step_back", back)
        run.exact("q", examples.NAME, each=True)
    steps = counted(monkeypatch)
    assert_same(run.exact("q", examples.NAME, each=True).scores, expected, 3 * examples.TERMS, size=1.0)
    assert 0 < len(steps) < 8
    assert not list(run.path.glob("exact-work*"))


def test_pieces_of_workers_make_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in one process: how the queries are cut, and that each block has some."""
    blocks = list[int]()

    def spread(work: Any, jobs: list[Any], workers: int) -> Any:
        blocks.extend(len(job[3]) for job in jobs)
        return ((i, work(*job)) for i, job in enumerate(jobs))

    monkeypatch.setattr(pieces, "spread", spread)
    run = recorded(tmp_path / "run")
    actual = run.exact("q", examples.NAME, each=True, workers=2)
    assert blocks == [2, 1]
    expected = reverse(examples.NAME, "q", args=run.config["recipe_args"]).scores
    assert_same(actual.scores, expected, 3 * examples.TERMS, size=1.0)
    with pytest.raises(UsageError, match="as 'package"):
        run.exact("q", examples.make, each=True, since=1, workers=2, check=False)


def test_what_cannot_be_computed_is_refused(run: Run) -> None:
    with pytest.raises(UsageError, match="no query set 'other'"):
        run.exact("other", examples.NAME)
    with pytest.raises(UsageError, match="listed twice"):
        run.exact(["q:1", "q:1"], examples.NAME)
    with pytest.raises(UsageError, match="since must be"):
        run.exact("q", examples.NAME, since=8)
    with pytest.raises(MismatchError, match="check=False"):
        run.exact("q", examples.make, since=1)


def test_a_damaged_result_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    run.exact("q:0", examples.NAME)
    (file,) = run.path.glob("exact-*.safetensors")
    from backstory.store.files import read_metadata, read_tensors, write_tensors

    write_tensors(file, {"scores": read_tensors(file)["scores"][:-1]}, read_metadata(file), checked=True)
    with pytest.raises(StoreError, match="one score for each"):
        backstory.open(run.path).exact("q:0", examples.NAME)


def test_a_recipe_of_another_order_is_refused_unchecked_too(run: Run) -> None:
    def turned() -> Recipe:
        made = examples.make(**run.config["recipe_args"])
        return replace(made, batches=[(ids[::-1], tuple(x.flip(0) for x in data)) for ids, data in made.batches])

    with pytest.raises(MismatchError, match="samples of step 0 in the recipe are not those that the run recorded"):
        run.exact("q", turned, since=2, check=False)


def test_what_was_not_checked_is_not_found_by_who_checks(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    wrong = {"optimizer": "decay"}
    first = run.exact("q", examples.NAME, args=wrong, check=False)
    run.tangents({"x": [1]}, examples.NAME, args=wrong, check=False)
    run.leave_out({"x": [1]}, examples.NAME, args=wrong, twins=0, check=False)
    with pytest.raises(UsageError, match="not stored in the run yet"):
        run.tangents({"x": [1]})
    with pytest.raises(UsageError, match="not stored in the run yet"):
        run.leave_out({"x": [1]}, twins=0)
    model = run.load_weights(examples.make().model)
    mean = lambda m, b: examples.loss(m, b).mean()  # noqa: E731
    assert run.query(model, mean, examples.make().queries["q"]).method == "adjoint"
    expected = reverse(examples.NAME, QuerySet("q", mean=True)).scores
    assert_same(run.exact("q", examples.NAME).scores, expected, 3 * examples.TERMS, size=1.0)
    assert torch.equal(run.exact("q", examples.NAME, check=False).scores, first.scores)
    assert sorted(x.checked for x in run.exact_results()) == [False, True]


def test_a_stored_result_of_another_loss_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    run.exact("q", examples.NAME)
    (file,) = run.path.glob("exact-*.safetensors")

    def doubled() -> Recipe:
        return replace(examples.make(), loss=lambda m, b: 2 * examples.loss(m, b))

    with pytest.raises(MismatchError, match=rf"of another loss.*{file.name}"):
        run.exact("q", doubled)
