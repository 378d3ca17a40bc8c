"""Going on after an interruption: the resumed run equals an undisturbed one, up to rounding, or is refused."""

import copy
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.loops import (
    FULL,
    Interrupted,
    Stored,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    restore,
    same_numbers,
    same_weights,
    sgd,
    snapshot,
    stored,
    terms_of,
    train,
)
from tests.support.oracles import assert_same
from tests.support.zoo import Again
from torch import Tensor, nn

import backstory
from backstory.capture import fingerprint
from backstory.errors import MismatchError, StoreError, UsageError
from backstory.recording import recorder as recorder_module
from backstory.recording import warmup as warmup_module
from backstory.recording.recorder import Recorder
from backstory.store import RunStore
from backstory.store.files import Spool

STEPS = 7
LEARNED: dict[str, Any] = {"projection": "learned", "rank": 2, "encoding": "float64", "warmup_steps": 4}
State = dict[str, Any]


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return sgd(model, momentum=0.9, dampening=0.2)


class Whole(NamedTuple):
    """A run without interruption."""

    path: Path
    kept: list[State]  # the user's own checkpoint before every step, and after the last


def undisturbed(
    path: Path,
    settings: dict[str, Any],
    make: Callable[[], nn.Module] = mlp,
    look: Callable[[int], object] = lambda t: None,
) -> Whole:
    kept = interrupted(path, STEPS, settings, make, look)
    return Whole(path, kept)


def interrupted(
    path: Path,
    stop: int,
    settings: dict[str, Any],
    make: Callable[[], nn.Module] = mlp,
    look: Callable[[int], object] = lambda t: None,
) -> list[State]:
    """A run whose step `stop` fails, unless that is the end; the user's own checkpoints of the steps before it."""
    model = make()
    optimizer = optimizer_of(model)
    kept: list[State] = []

    def seen(t: int, ids: Any) -> None:
        look(t)
        kept.append(snapshot(model, optimizer))

    with nullcontext() if stop == STEPS else pytest.raises(Interrupted):
        train(path, model, optimizer, STEPS, stop=stop, max_norm=0.1, seen=seen, **settings)
    return [*kept[:stop], snapshot(model, optimizer)]


def go_on(
    path: Path, start: int, state: State, settings: dict[str, Any], make: Callable[[], nn.Module] = mlp
) -> nn.Module:
    model = make()
    optimizer = optimizer_of(model)
    restore(state, model, optimizer)
    train(path, model, optimizer, STEPS, max_norm=0.1, start=start, **{"resume": True, **settings})
    return model


def same_run(whole: Whole, path: Path, model: nn.Module) -> None:
    """A run that went on, and the model that it ended with."""
    first, second = RunStore.open(whole.path), RunStore.open(path)
    same_weights(model.state_dict(), whole.kept[-1]["model"], terms_of(model, STEPS))
    assert second.config["fingerprints"][str(STEPS)] == fingerprint(model)
    actual, expected = stored(path), stored(whole.path)
    if second.config["encoding"] == "int8":
        actual = actual._replace(rows=at_the_same_codes(actual, expected))
    same_numbers(actual, expected, terms_of(model, STEPS))
    one, two = (x.load_tensors("basis") if "basis" in x.tensor_names() else {} for x in (first, second))
    assert one.keys() == two.keys()
    for name in one:
        assert_same(two[name], one[name], terms_of(model, STEPS))
    assert first.tensor_metadata("basis") == second.tensor_metadata("basis")
    assert all(first.config[k] == second.config[k] for k in ("blocks", "layers")), "the layout of rows"
    assert second.verify() == []
    assert second.spool.steps() == []


def at_the_same_codes(actual: Stored, expected: Stored) -> Tensor:
    """A number that lies between two codes may fall to either: hardly ever, and to no other."""
    code = expected.rows.abs().max() / 127
    apart = (actual.rows - expected.rows).abs()
    assert apart.max() < 1.01 * code
    assert (apart > code / 100).double().mean() < 0.01
    return torch.where(apart > code / 100, expected.rows, actual.rows)


def again() -> nn.Module:
    torch.manual_seed(0)
    return Again().double()


CASES = {
    "full": (FULL, mlp),
    "learned": (LEARNED, mlp),
    "learned, several calls": (LEARNED, again),
    "learned, int8": ({**LEARNED, "encoding": "int8"}, mlp),
}


@pytest.mark.parametrize("case", CASES)
def test_after_an_exception_in_any_step(case: str, tmp_path: Path) -> None:
    settings, make = CASES[case]
    whole = undisturbed(tmp_path / "whole", settings, make)
    for stop in range(STEPS):
        kept = interrupted(tmp_path / f"{stop}", stop, settings, make)
        model = go_on(tmp_path / f"{stop}", stop, kept[stop], settings, make)
        same_run(whole, tmp_path / f"{stop}", model)


@pytest.mark.parametrize("back", [1, pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("case", ["full", "learned", "learned, several calls"])
def test_from_an_older_checkpoint(case: str, back: int, tmp_path: Path) -> None:
    """What lay beyond it is replaced, also where the resumed steps were part of a finished warm-up."""
    settings, make = CASES[case]
    whole = undisturbed(tmp_path / "whole", settings, make)
    for stop in range(back, STEPS):
        kept = interrupted(tmp_path / f"{stop}", stop, settings, make)
        model = go_on(tmp_path / f"{stop}", stop - back, kept[stop - back], settings, make)
        same_run(whole, tmp_path / f"{stop}", model)


@pytest.mark.parametrize("case", ["full", "learned"])
def test_after_a_death_without_a_word(case: str, tmp_path: Path) -> None:
    """The folder as it lies on disk between two steps, with what still waits in memory lost."""
    settings, _ = CASES[case]
    whole = undisturbed(
        tmp_path / "whole", settings, look=lambda t: shutil.copytree(tmp_path / "whole", tmp_path / f"{t}")
    )
    for t in range(STEPS):
        store = RunStore.open(tmp_path / f"{t}")
        assert store.verify() == []
        held = store.n_steps() or len(store.spool.steps())
        assert held == (min(t, 4) if case == "learned" else 0), "warm-up steps are durable one by one"
        model = go_on(tmp_path / f"{t}", held, whole.kept[held], settings)
        same_run(whole, tmp_path / f"{t}", model)


@pytest.mark.parametrize(
    "moment",
    ["before the basis", "before the layout", "before projection", "amid projection", "before the spool is cleared"],
)
def test_a_death_at_the_end_of_the_warm_up(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = undisturbed(tmp_path / "whole", LEARNED)
    with monkeypatch.context() as patch:
        _die(patch, moment)
        kept = interrupted(tmp_path / "run", 4, LEARNED)
    store = RunStore.open(tmp_path / "run")
    assert store.verify() == []
    assert ("basis" in store.tensor_names()) == (moment != "before the basis")
    settled = any(b["shape"][4] for b in store.config["blocks"])
    assert settled == (moment not in ("before the basis", "before the layout"))
    assert store.spool.steps() == [0, 1, 2, 3]
    for start in (4, 2):
        shutil.copytree(tmp_path / "run", tmp_path / f"{start}")
        model = go_on(tmp_path / f"{start}", start, kept[start], LEARNED)
        same_run(whole, tmp_path / f"{start}", model)


def _die(patch: pytest.MonkeyPatch, moment: str) -> None:
    def dead(*args: Any, **kwargs: Any) -> Any:
        raise Interrupted

    def some(*args: Any) -> Any:
        for i, step in enumerate(project(*args)):
            if i == 2:
                raise Interrupted
            yield step

    project = warmup_module.project_spooled
    if moment == "before the basis":
        patch.setattr(recorder_module, "learn", dead)
    elif moment == "before the layout":
        patch.setattr(warmup_module, "settle_layout", dead)
    elif moment == "before projection":
        patch.setattr(recorder_module, "project_spooled", dead)
    elif moment == "amid projection":
        patch.setattr(recorder_module, "project_spooled", some)
    else:
        patch.setattr(Spool, "clear", dead)
    patch.setattr(Recorder, "_finish", lambda self, failed: (self._writer.close(), self.store.close()))


def test_an_old_config_beside_a_new_basis_is_mended(tmp_path: Path) -> None:
    """A power failure may bring back the `config.json` from before the layout was settled; no row can be there yet."""
    whole = undisturbed(tmp_path / "whole", LEARNED)
    old: list[bytes] = []
    run = tmp_path / "run"
    kept = undisturbed(run, LEARNED, look=lambda t: old.append((run / "config.json").read_bytes())).kept
    with RunStore.open(run, write=True) as store:
        settled = store.config["blocks"], store.config["layers"]
        store.truncate(0)
    (run / "config.json").write_bytes(old[2])
    before = RunStore.open(run)
    assert (before.config["blocks"], before.config["layers"]) != settled
    model = go_on(run, 0, kept[0], LEARNED)
    assert (RunStore.open(run).config["blocks"], RunStore.open(run).config["layers"]) == settled
    same_run(whole, run, model)


def test_a_warm_up_that_ends_by_bytes_ends_at_the_same_step(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path / "probe", model := mlp(), optimizer_of(model), 4, stop=3, **LEARNED)
    settings = {
        **LEARNED,
        "warmup_steps": 99,
        "warmup_bytes": warmup_module.spooled_bytes(RunStore.open(tmp_path / "probe")),
    }
    whole = undisturbed(tmp_path / "whole", settings)
    kept = interrupted(tmp_path / "run", 2, settings)
    model = go_on(tmp_path / "run", 2, kept[2], settings)
    same_run(whole, tmp_path / "run", model)


def test_embeddings_and_checkpoints_of_replaced_steps_are_gone(tmp_path: Path) -> None:
    settings = {**FULL, "checkpoints": 2, "planned": STEPS}
    kept = undisturbed(tmp_path / "run", settings).kept
    run = backstory.open(tmp_path / "run")
    assert run.checkpoints == [0, 2, 5, 7]
    run.embed()
    run.embed(at=2)
    model = mlp()
    optimizer = optimizer_of(model)
    restore(kept[4], model, optimizer)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, start=4, **FULL):
        pass
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 4
    assert run.checkpoints == [0, 2, 4], "the last are those that the run ended with"
    assert list(run._store.embeddings()) == [2]
    assert set(run.config["fingerprints"]) == {"0", "2", "4"}
    assert run.config["unverified_joins"] == [4]
    assert any("recording was resumed at step 4 without verifying the weights" in note for note in run.caveats())
    restore(kept[2], model, optimizer)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, start=2, **FULL):
        pass
    checked = backstory.open(tmp_path / "run")
    assert checked.config["unverified_joins"] == [], "the run knows the weights of step 2"
    assert not any("without verifying" in note for note in checked.caveats())


def test_checkpoints_beyond_a_resumed_warm_up_are_gone(tmp_path: Path) -> None:
    settings = {**LEARNED, "warmup_steps": 99, "checkpoints": 6, "planned": STEPS}
    model = mlp()
    kept: list[State] = []
    optimizer = optimizer_of(model)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model, optimizer, STEPS, stop=5, seen=lambda t, i: kept.append(snapshot(model, optimizer)),
              **settings)  # fmt: skip
    restore(kept[2], model, optimizer)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, start=2, **LEARNED):
        assert backstory.open(tmp_path / "run").checkpoints == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 3}, r"settings changed \(rank: 2 in the run, 3 now\).*new folder"),
        ({"projection": "random"}, r"settings changed \(.*projection: 'learned' in the run, 'random' now\)"),
        ({"seed": 5}, r"settings changed \(seed: 0 in the run, 5 now\). Resume with the run's settings"),
        ({"encoding": "int8"}, r"encoding: 'float64' in the run, 'int8' now"),
        ({"loss_reduction": "sum"}, r"loss_reduction: 'mean' in the run, 'sum' now"),
        ({"layers": ["!2"]}, r"differ from the run in 2.bias, 2.weight"),
    ],
)
def test_other_settings_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2, **LEARNED)
    with pytest.raises(MismatchError, match=message):
        train(tmp_path / "run", model, sgd(model), 3, start=2, **{**LEARNED, **change})
    train(tmp_path / "run", model, sgd(model), 3, start=2, **LEARNED)  # the lock is free, and nothing was changed
    assert backstory.open(tmp_path / "run").n_steps == 3


def test_another_model_or_other_groups_are_refused(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2)
    wide = mlp(width=5)
    with pytest.raises(MismatchError, match=r"differ from the run in 0.bias, 0.weight, 2.weight"):
        train(tmp_path / "run", wide, sgd(wide), 3, start=2)
    first, *rest = model.parameters()
    grouped = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
    with pytest.raises(MismatchError, match=r"optimizer groups differ"):
        train(tmp_path / "run", model, grouped, 3, start=2)


def test_weights_that_are_not_those_of_the_step_are_refused(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2)
    fresh = mlp()
    with pytest.raises(MismatchError, match=r"not those of step 2, .*Load your checkpoint"):
        train(tmp_path / "run", fresh, sgd(fresh), 3, start=2)
    train(tmp_path / "run", model, sgd(model), 3, start=2)


def test_steps_that_would_be_missing_are_refused(tmp_path: Path) -> None:
    for settings in (FULL, {**LEARNED, "warmup_steps": 9}):
        model = mlp()
        path = tmp_path / settings["projection"]
        with pytest.raises(Interrupted):
            train(path, model, sgd(model), 4, stop=3, **settings)
        with pytest.raises(StoreError, match=r"has steps 0 to 2.*from step 4.*checkpoint at step 3 or earlier"):
            train(path, model, sgd(model), 5, start=4, **settings)
        store = RunStore.open(path)
        assert (store.n_steps() or len(store.spool.steps())) == 3


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(StoreError, match=r"does not exist. Check the path"):
        train(tmp_path / "none", model, sgd(model), 3, start=2)


def test_ranks_by_pattern_can_be_resumed(tmp_path: Path) -> None:
    model = mlp()
    settings: dict[str, Any] = {"projection": "random", "rank": {"0*": (2, 1), "*": 2}}
    train(tmp_path / "run", model, sgd(model), 2, **settings)
    train(tmp_path / "run", model, sgd(model), 3, start=2, **settings)
    assert backstory.open(tmp_path / "run").n_steps == 3


def test_loops_helpers_give_back_what_they_kept() -> None:
    model = mlp()
    optimizer = optimizer_of(model)
    state = snapshot(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    cross_entropy(model, batch_of(ids_of(0))).mean().backward()
    optimizer.step()
    restore(state, model, optimizer)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_resuming_needs_a_step_and_the_model_of_that_step(tmp_path: Path) -> None:
    """`resume=True` alone must not throw a run away, and step 0 is checked like any other."""
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 3)
    with pytest.raises(UsageError, match=r"has 3 steps: start=3"):
        backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", resume=True, **FULL)
    with (
        pytest.raises(MismatchError, match="step 0"),
        backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", resume=True, start=0, **FULL),
    ):
        pass
    assert backstory.open(tmp_path / "run").n_steps == 3


def test_what_a_proxy_drops_after_a_resumption_is_named_too(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2, optimizer_model="sgd")
    train(tmp_path / "run", model, sgd(model, momentum=0.9), 3, start=2, optimizer_model="sgd")
    run = backstory.open(tmp_path / "run")
    assert run.config["optimizer"]["dropped"] == ["momentum 0.9"]
    assert "without momentum 0.9" in run.recording_report().words[0]
