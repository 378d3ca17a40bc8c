"""What a recording keeps for replays: random states, data, the state of training, the time of a step."""

import itertools
import random
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.loops import FULL, Interrupted, batch_of, cross_entropy, ids_of, mlp, restore, snapshot
from tests.support.oracles import assert_same
from torch import nn

import backstory
from backstory.capture.randomness import checksums, generators, own_randomness, seed, unpack
from backstory.errors import DiskError
from backstory.recording.replays import Stopwatch, checkpoint_bytes
from backstory.store import RunStore

STEPS, EPOCH = 6, 4  # the second epoch begins with this step
LEARNED: dict[str, Any] = {"projection": "learned", "rank": 2, "encoding": "float64", "warmup_steps": 4}
Kept = dict[int, tuple[Any, ...]]


def net() -> nn.Module:
    model = mlp()
    assert isinstance(model, nn.Sequential)
    model.insert(2, nn.Dropout(0.5))
    return model


def train(
    path: Path,
    settings: dict[str, Any],
    *,
    start: int = 0,
    given: Any = None,
    stop: int | None = None,
    steps: int = STEPS,
) -> Kept:
    """A loop with dropout that draws an order from NumPy at each epoch; what a user would keep before every step."""
    model, kept = net(), Kept()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(1)
    np.random.seed(2)
    if given is not None:
        restore(given[0], model, optimizer)
        seed(given[1])
    resumed: dict[str, Any] = {"resume": True, "start": start} if start or given is not None else {}
    with backstory.record(model, optimizer, path, loss_reduction="mean", steps=STEPS, **settings, **resumed) as rec:
        for t in range(start, steps):
            kept[t] = snapshot(model, optimizer), generators()
            if t % EPOCH == 0:
                np.random.permutation(9)
            ids = ids_of(t)
            optimizer.zero_grad()
            with rec.step(ids):
                cross_entropy(model, batch_of(ids)).mean().backward()
                if t == stop:
                    raise Interrupted
                optimizer.step()
    kept[steps] = snapshot(model, optimizer), generators()
    return kept


@pytest.fixture(scope="module", params=[FULL, LEARNED], ids=["full", "learned"])
def whole(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any], Kept]:
    settings = {**request.param, "checkpoints": 2}
    path = tmp_path_factory.mktemp("replays") / "run"
    with own_randomness():
        return path, settings, train(path, settings)


def test_random_states_are_kept_where_something_was_drawn_between_steps(whole: tuple[Path, Any, Kept]) -> None:
    """Dropout draws inside of every step, and needs none."""
    drawn = {t: unpack(x) for t, x in RunStore.open(whole[0]).random_states().items()}
    assert {t: set(x) - {"cuda"} for t, x in drawn.items()} == {0: {"torch", "python", "numpy"}, EPOCH: {"numpy"}}
    before = whole[2][EPOCH][1]
    assert not torch.equal(drawn[EPOCH]["numpy"], before["numpy"]), "before the order of the epoch was drawn"
    assert torch.equal(drawn[0]["torch"], whole[2][0][1]["torch"])
    sums = RunStore.open(whole[0]).steps().generators
    assert [tuple(x) for x in sums[:-1]] == [checksums(whole[2][t][1]) for t in range(1, STEPS)]


def test_checkpoints_hold_the_state_of_training(whole: tuple[Path, Any, Kept]) -> None:
    store = RunStore.open(whole[0])
    assert store.restarts() == store.checkpoints() == [0, 2, 4, 6]
    names = [name for name, _ in net().named_parameters()]
    for t in store.restarts():
        state, (kept, random_states) = store.load_state(t), whole[2][t]
        entries = {
            f"{names[i]}/{key}": value for i, x in kept["optimizer"]["state"].items() for key, value in x.items()
        }
        there = {k for k in state if not k.startswith("random/")}
        assert there == set(entries)
        assert all(torch.equal(state[k], entries[k]) for k in there)
        assert all(torch.equal(state[f"random/{kind}"], x) for kind, x in random_states.items())
    assert store.verify() == []


def test_each_step_has_the_checksum_of_its_data(whole: tuple[Path, Any, Kept]) -> None:
    sums = RunStore.open(whole[0]).steps().batch.tolist()
    assert min(sums) >= 0
    for (a, b), (x, y) in zip(pairwise(range(STEPS)), pairwise(sums), strict=True):
        assert (ids_of(a) == ids_of(b)) == (x == y)


def test_a_model_that_is_not_called_as_a_whole_has_none(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec, rec.step([1, 2]):
        x, y = batch_of([1, 2])
        for layer in model.children():
            x = layer(x)
        nn.functional.cross_entropy(x, y).backward()
        optimizer.step()
    store = RunStore.open(tmp_path / "run")
    assert store.steps().batch.tolist() == [-1]
    assert (store.restarts(), next(iter(store.load_state(0)))[:7]) == ([], "random/"), "for the first batch"


def same_for_replays(path: Path, expected: Path) -> None:
    """All that two runs keep for replays: copies of generators and data bit for bit, states of training up to rounding."""
    a, b = RunStore.open(path), RunStore.open(expected)
    np.testing.assert_array_equal(a.steps().batch, b.steps().batch)
    np.testing.assert_array_equal(a.steps().generators, b.steps().generators)
    assert a.random_states() == b.random_states()
    assert a.restarts() == a.checkpoints()
    assert {*a.restarts()} - {5} == {*b.restarts()}, "beside those that are planned, where it was interrupted"
    for t in b.restarts():
        here, there = a.load_state(t), b.load_state(t)
        assert here.keys() == there.keys()
        for name in there:
            assert_same(here[name], there[name], 100 * STEPS)
    assert a.verify() == []


@pytest.mark.parametrize("start", [1, 4, *(pytest.param(t, marks=pytest.mark.slow) for t in (0, 2, 3, 5))])
def test_a_resumed_run_keeps_what_an_undisturbed_one_does(
    whole: tuple[Path, Any, Kept], start: int, tmp_path: Path
) -> None:
    """Interrupted in its sixth step; the user's checkpoint is an earlier one and has the random states too."""
    path, settings, kept = whole
    with own_randomness(), pytest.raises(Interrupted):
        train(tmp_path / "run", settings, stop=5)
    with own_randomness():
        train(tmp_path / "run", settings, start=start, given=kept[start])
    same_for_replays(tmp_path / "run", path)


def test_who_resumes_without_the_random_states_has_them_kept(whole: tuple[Path, Any, Kept], tmp_path: Path) -> None:
    with own_randomness(), pytest.raises(Interrupted):
        train(tmp_path / "run", whole[1], stop=3)
    with own_randomness():
        other = {**whole[2][3][1], "torch": torch.Generator().manual_seed(99).get_state()}
        train(tmp_path / "run", whole[1], start=3, given=(whole[2][3][0], other))
    drawn = {t: unpack(x) for t, x in RunStore.open(tmp_path / "run").random_states().items()}
    assert {t: set(x) - {"cuda"} for t, x in drawn.items() if t} == {3: {"torch"}, EPOCH: {"numpy"}}
    assert torch.equal(drawn[3]["torch"], other["torch"])


def test_a_checkpoint_of_steps_that_were_lost_is_no_restart(whole: tuple[Path, Any, Kept], tmp_path: Path) -> None:
    """As after a kill between a checkpoint and its rows: state and weights are there, their steps are not."""
    shutil.copytree(whole[0], tmp_path / "run")
    with RunStore.open(tmp_path / "run", write=True) as store:
        store._steps.delete("step >= 3")
    store = RunStore.open(tmp_path / "run")
    assert store.n_steps() == 3
    assert store.restarts() == [0, 2]
    with own_randomness():
        train(tmp_path / "run", whole[1], start=3, given=whole[2][3])
    same_for_replays(tmp_path / "run", whole[0])


def test_states_after_the_step_that_training_resumes_from_go(whole: tuple[Path, Any, Kept], tmp_path: Path) -> None:
    shutil.copytree(whole[0], tmp_path / "run")
    with RunStore.open(tmp_path / "run", write=True) as store:
        store.truncate(3)
    left = [name for name in RunStore.open(tmp_path / "run").tensor_names() if name.startswith("state-")]
    assert left == ["state-00000000", "state-00000002"]


def test_a_state_without_weights_is_no_restart(whole: tuple[Path, Any, Kept], tmp_path: Path) -> None:
    """As after a kill between the two files of a checkpoint."""
    shutil.copytree(whole[0], tmp_path / "run")
    (tmp_path / "run" / "checkpoint-00000004.safetensors").unlink()
    assert RunStore.open(tmp_path / "run").restarts() == [0, 2, 6]


def one_step(rec: backstory.Recorder, model: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
    optimizer.zero_grad()
    with rec.step(ids_of(t)) as s, s.outputs_of(model, "cross-entropy"):
        cross_entropy(model, batch_of(ids_of(t))).mean().backward()
        optimizer.step()


def test_a_compressed_run_keeps_them_too(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    settings: dict[str, Any] = {
        "loss_reduction": "mean",
        "curvature": "sampled:1",
        "steps": 3,
        "checkpoints": 1,
        **FULL,
    }
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        for t in range(3):
            one_step(rec, model, optimizer, t)
    backstory.open(tmp_path / "run").compress(tmp_path / "small")
    assert len(RunStore.open(tmp_path / "run").restarts()) == 3
    same_for_replays(tmp_path / "small", tmp_path / "run")


def test_states_count_against_the_budget(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    arguments: dict[str, Any] = {"loss_reduction": "mean", "steps": 60, "max_bytes": 200_000, **FULL}
    with backstory.record(model, optimizer, tmp_path / "few", checkpoints=1, **arguments) as rec:
        one_step(rec, model, optimizer, 0)
    each = checkpoint_bytes(model, optimizer)
    assert 10_000 < each < 30_000, "random states most of all"
    with pytest.raises(DiskError, match="Nothing was recorded"):
        with backstory.record(model, optimizer, tmp_path / "many", checkpoints=50, **arguments) as rec:
            one_step(rec, model, optimizer, 0)
    tight = {**arguments, "steps": None, "max_bytes": RunStore.open(tmp_path / "few").size_bytes() + each // 2}
    with pytest.raises(DiskError, match="would exceed max_bytes"):  # each step is drawn for anew
        with backstory.record(model, optimizer, tmp_path / "drawn", **tight) as rec:
            for t in range(60):
                torch.rand(1)
                one_step(rec, model, optimizer, t)


@pytest.mark.parametrize("on_cpu", [False, True])
def test_the_time_of_a_step_is_the_median(
    on_cpu: bool, whole: tuple[Path, Any, Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a processor that of the thread itself, which stands still while the machine does other things."""
    assert 0 < RunStore.open(whole[0]).config["training"]["seconds_per_step"] < 60
    now = iter([0.0, 1.0, 10.0, 13.0, 20.0, 22.0, 30.0])
    clocks = ("thread_time", "perf_counter") if on_cpu else ("perf_counter", "thread_time")
    monkeypatch.setattr(f"time.{clocks[0]}", lambda: next(now))
    monkeypatch.setattr(f"time.{clocks[1]}", iter(range(0, 10**6, 1000)).__next__)
    watch = Stopwatch(on_cpu)
    assert watch.median is None
    for _ in range(3):
        watch.begin()
        watch.keep(watch.stop())
        watch.over()
    assert watch.median == 2.0, "1, 3 and 2 seconds; what recording took in between is left out"


def test_a_run_on_a_processor_has_the_threads_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setattr("time.thread_time", itertools.count(0.0, 500.0).__next__)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for _ in range(3):
            one_step(rec, model, optimizer, 0)
    assert RunStore.open(tmp_path / "run").config["training"] == {"seconds_per_step": 500.0}


def test_python_is_watched_too(tmp_path: Path) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with own_randomness(), backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            random.sample(range(9), t // 2)
            one_step(rec, model, optimizer, t)
    drawn = {t: set(unpack(x)) for t, x in RunStore.open(tmp_path / "run").random_states().items()}
    assert drawn[2] == {"python"}
    assert set(drawn) == {0, 2}
