"""Going on after an interruption: the resumed run equals an undisturbed one bit for bit, or is refused."""

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.session.loops import (
    FULL,
    Interrupted,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    restore,
    same_bits,
    sgd,
    snapshot,
    stored,
    train,
)
from tests.session.zoo import Again
from torch import nn

import backstory
from backstory.errors import MismatchError, StoreError, UsageError
from backstory.session import recorder as recorder_module
from backstory.session import warmup as warmup_module
from backstory.session.recorder import Recorder
from backstory.store import RunStore

STEPS = 7
LEARNED: dict[str, Any] = {"subspace": "learned", "rank": 2, "encoding": "float64", "warmup_steps": 4}
State = dict[str, Any]


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return sgd(model, momentum=0.9, dampening=0.2)


def undisturbed(path: Path, settings: dict[str, Any], make: Callable[[], nn.Module] = mlp) -> list[State]:
    """A run without interruption, and the user's own checkpoint before every step."""
    model = make()
    optimizer = optimizer_of(model)
    kept: list[State] = []
    train(
        path,
        model,
        optimizer,
        STEPS,
        max_norm=0.1,
        seen=lambda t, ids: kept.append(snapshot(model, optimizer)),
        **settings,
    )
    return [*kept, snapshot(model, optimizer)]


def go_on(path: Path, start: int, state: State, settings: dict[str, Any], make: Callable[[], nn.Module] = mlp) -> None:
    model = make()
    optimizer = optimizer_of(model)
    restore(state, model, optimizer)
    train(path, model, optimizer, STEPS, max_norm=0.1, start=start, **{"resume": True, **settings})


def same_run(a: Path, b: Path) -> None:
    same_bits(stored(a), stored(b))
    first, second = RunStore.open(a), RunStore.open(b)
    one, two = first.load_tensors("basis"), second.load_tensors("basis")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[k], two[k]) for k in one)
    assert first.tensor_metadata("basis") == second.tensor_metadata("basis")
    assert all(first.config[k] == second.config[k] for k in ("blocks", "layers")), "the layout of rows"
    assert second.verify() == []
    assert second.spooled() == []
    assert second.config["fingerprints"][str(STEPS)] == first.config["fingerprints"][str(STEPS)]


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
    kept = undisturbed(tmp_path / "whole", settings, make)
    for stop in range(STEPS):
        model = make()
        with pytest.raises(Interrupted):
            train(tmp_path / f"{stop}", model, optimizer_of(model), STEPS, stop=stop, max_norm=0.1, **settings)
        go_on(tmp_path / f"{stop}", stop, kept[stop], settings, make)
        same_run(tmp_path / "whole", tmp_path / f"{stop}")


@pytest.mark.parametrize("back", [1, pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("case", ["full", "learned", "learned, several calls"])
def test_from_an_older_checkpoint(case: str, back: int, tmp_path: Path) -> None:
    """What lay beyond it is replaced, also where the resumed steps were part of a finished warm-up."""
    settings, make = CASES[case]
    kept = undisturbed(tmp_path / "whole", settings, make)
    for stop in range(back, STEPS):
        model = make()
        with pytest.raises(Interrupted):
            train(tmp_path / f"{stop}", model, optimizer_of(model), STEPS, stop=stop, max_norm=0.1, **settings)
        go_on(tmp_path / f"{stop}", stop - back, kept[stop - back], settings, make)
        same_run(tmp_path / "whole", tmp_path / f"{stop}")


@pytest.mark.parametrize("case", ["full", "learned"])
def test_after_a_death_without_a_word(case: str, tmp_path: Path) -> None:
    """The folder as it lies on disk between two steps, with what still waits in memory lost."""
    settings, _ = CASES[case]
    kept: list[State] = []
    model = mlp()
    optimizer = optimizer_of(model)

    def photograph(t: int, ids: Any) -> None:
        shutil.copytree(tmp_path / "whole", tmp_path / f"{t}")
        kept.append(snapshot(model, optimizer))

    train(tmp_path / "whole", model, optimizer, STEPS, max_norm=0.1, seen=photograph, **settings)
    for t in range(STEPS):
        store = RunStore.open(tmp_path / f"{t}")
        assert store.verify() == []
        held = store.n_steps() or len(store.spooled())
        assert held == (min(t, 4) if case == "learned" else 0), "warm-up steps are durable one by one"
        go_on(tmp_path / f"{t}", held, kept[held], settings)
        same_run(tmp_path / "whole", tmp_path / f"{t}")


@pytest.mark.parametrize(
    "moment",
    ["before the basis", "before the layout", "before projection", "amid projection", "before the spool is cleared"],
)
def test_a_death_at_the_end_of_the_warm_up(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = undisturbed(tmp_path / "whole", LEARNED)
    with monkeypatch.context() as patch:
        _die(patch, moment)
        model = mlp()
        with pytest.raises(Interrupted):
            train(tmp_path / "run", model, optimizer_of(model), STEPS, max_norm=0.1, **LEARNED)
    store = RunStore.open(tmp_path / "run")
    assert store.verify() == []
    assert ("basis" in store.tensor_names()) == (moment != "before the basis")
    settled = any(b["shape"][4] for b in store.config["blocks"])
    assert settled == (moment not in ("before the basis", "before the layout"))
    assert store.spooled() == [0, 1, 2, 3]
    for start in (4, 2):
        shutil.copytree(tmp_path / "run", tmp_path / f"{start}")
        go_on(tmp_path / f"{start}", start, kept[start], LEARNED)
        same_run(tmp_path / "whole", tmp_path / f"{start}")


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
        patch.setattr(RunStore, "clear_spool", dead)
    patch.setattr(Recorder, "_finish", lambda self, failed: (self._writer.close(), self.store.close()))


def test_an_old_config_beside_a_new_basis_is_mended(tmp_path: Path) -> None:
    """A power failure may bring back the `config.json` from before the layout was settled; no row can be there yet."""
    kept = undisturbed(tmp_path / "whole", LEARNED)
    old: list[bytes] = []
    model = mlp()
    optimizer = optimizer_of(model)
    run = tmp_path / "run"
    train(run, model, optimizer, STEPS, max_norm=0.1, **LEARNED,
          seen=lambda t, ids: old.append((run / "config.json").read_bytes()))  # fmt: skip
    with RunStore.open(run, write=True) as store:
        settled = store.config["blocks"], store.config["layers"]
        store.truncate(0)
    (run / "config.json").write_bytes(old[2])
    before = RunStore.open(run)
    assert (before.config["blocks"], before.config["layers"]) != settled
    go_on(run, 0, kept[0], LEARNED)
    assert (RunStore.open(run).config["blocks"], RunStore.open(run).config["layers"]) == settled
    same_run(tmp_path / "whole", run)


def test_a_warm_up_that_ends_by_bytes_ends_at_the_same_step(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tmp_path / "probe", model := mlp(), optimizer_of(model), 4, stop=3, **LEARNED)
    settings = {
        **LEARNED,
        "warmup_steps": 99,
        "warmup_bytes": warmup_module.spooled_bytes(RunStore.open(tmp_path / "probe")),
    }
    kept = undisturbed(tmp_path / "whole", settings)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model := mlp(), optimizer_of(model), STEPS, stop=2, max_norm=0.1, **settings)
    go_on(tmp_path / "run", 2, kept[2], settings)
    same_run(tmp_path / "whole", tmp_path / "run")


def test_embeddings_and_checkpoints_of_replaced_steps_are_gone(tmp_path: Path) -> None:
    settings = {**FULL, "checkpoints": 2, "planned": STEPS}
    kept = undisturbed(tmp_path / "run", settings)
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
    assert run.checkpoints == [0, 2]
    assert list(run.store.embeddings()) == [2]
    assert set(run.config["fingerprints"]) == {"0", "2", "4"}
    assert run.config["unverified_joins"] == [4]
    assert any("recording went on at step 4 with weights that the run does not know" in note for note in run.notes())
    restore(kept[2], model, optimizer)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, start=2, **FULL):
        pass
    checked = backstory.open(tmp_path / "run")
    assert checked.config["unverified_joins"] == [], "the run knows the weights of step 2"
    assert not any("does not know" in note for note in checked.notes())


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
        ({"subspace": "random"}, r"settings changed \(subspace: 'learned' in the run, 'random' now\)"),
        ({"seed": 5}, r"settings changed \(seed: 0 in the run, 5 now\). Resume with the run's own"),
        ({"encoding": "int8"}, r"encoding: 'float64' in the run, 'int8' now"),
        ({"loss_reduction": "sum"}, r"loss_reduction: 'mean' in the run, 'sum' now"),
        ({"layers": ["!2"]}, r"differ from those of the run in 2.bias, 2.weight"),
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
    with pytest.raises(MismatchError, match=r"differ from those of the run in 0.bias, 0.weight, 2.weight"):
        train(tmp_path / "run", wide, sgd(wide), 3, start=2)
    first, *rest = model.parameters()
    grouped = torch.optim.SGD([{"params": [first]}, {"params": rest}], lr=0.1)
    with pytest.raises(MismatchError, match=r"optimizer groups differ"):
        train(tmp_path / "run", model, grouped, 3, start=2)


def test_weights_that_are_not_those_of_the_step_are_refused(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2)
    fresh = mlp()
    with pytest.raises(MismatchError, match=r"not the one that training had at step 2.*Load your own checkpoint"):
        train(tmp_path / "run", fresh, sgd(fresh), 3, start=2)
    train(tmp_path / "run", model, sgd(model), 3, start=2)


def test_steps_that_would_be_missing_are_refused(tmp_path: Path) -> None:
    for settings in (FULL, {**LEARNED, "warmup_steps": 9}):
        model = mlp()
        path = tmp_path / settings["subspace"]
        with pytest.raises(Interrupted):
            train(path, model, sgd(model), 4, stop=3, **settings)
        with pytest.raises(StoreError, match=r"holds steps 0 to 2.*from step 4.*checkpoint at step 3 or earlier"):
            train(path, model, sgd(model), 5, start=4, **settings)
        store = RunStore.open(path)
        assert (store.n_steps() or len(store.spooled())) == 3


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(StoreError, match="does not exist; expected the folder of a recorded run"):
        train(tmp_path / "none", model, sgd(model), 3, start=2)


def test_ranks_by_pattern_can_be_resumed(tmp_path: Path) -> None:
    model = mlp()
    settings: dict[str, Any] = {"subspace": "random", "rank": {"0*": (2, 1), "*": 2}}
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
    with pytest.raises(UsageError, match=r"holds 3 steps: start=3"):
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
    assert "without momentum 0.9" in run.validity().words()[0]
