"""Groups left out of a recorded run: against ordinary loops, stored, read again, and continued."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import MismatchError, StoreError, UsageError
from backstory.exact.variants import Alone, Replicas
from backstory.replay.recipe import Recipe
from backstory.results import GroupEffects
from backstory.run import pieces
from backstory.run.run import Run

ARGS: dict[str, Any] = {"optimizer": "momentum", "schedule": True, "dropout": 0.4}
SOURCES = {"a": [0, 3, 6, 9], "b": [1, 4, 7, 10], "c": [2, 5, 8, 11]}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return with_sources(tmp_path_factory.mktemp("left out") / "run")


def with_sources(path: Path) -> Run:
    run = recorded(path, **ARGS)
    run.describe(range(examples.N), source=["abc"[i % 3] for i in range(examples.N)])
    return run


def losses_by_hand(gone: dict[int, list[int]], until: int) -> Tensor:
    """Query losses (3,) before step `until` without what is gone, by an ordinary loop."""
    recipe = examples.make(**ARGS)
    short = Recipe(
        model=recipe.model, optimizer=recipe.optimizer, loss=recipe.loss, batches=recipe.batches[:until],
        queries=recipe.queries, schedule=recipe.schedule,
    )  # fmt: skip
    return examples.by_hand(short, {(t, i): 0.0 for t, places in gone.items() for i in places})


def places(ids: list[int]) -> dict[int, list[int]]:
    batches = examples.make(**ARGS).batches
    return {t: [i for i, s in enumerate(names) if s in ids] for t, (names, _) in enumerate(batches)}


def effects(changes: Any, at: int | str = "all") -> GroupEffects:
    recipe = examples.make(**ARGS)
    result: GroupEffects = changes.effects(recipe.model, recipe.loss, recipe.queries["q"], at)
    return result


def test_effects_equal_ordinary_loops_at_every_checkpoint(run: Run) -> None:
    result = effects(run.leave_out("source", examples.NAME))
    assert result.checkpoints == tuple(c for c in run.checkpoints if c > 0)
    assert (result.groups, result.samples, result.by) == (("a", "b", "c"), (4, 4, 4), ("source",))
    assert sum(result.occurrences) == 32
    for g, ids in enumerate(SOURCES.values()):
        for c, step in enumerate(result.checkpoints):
            base = losses_by_hand({}, step)
            assert_same(result.losses[c], base, examples.TERMS, size=1.0)
            assert_same(result.values[g, c], losses_by_hand(places(ids), step) - base, examples.TERMS, size=1.0)
    assert float(result.values.abs().min()) > 1e-6
    assert bool(result.clear.all())
    assert result.floor is not None
    assert 0 < float(result.floor.max()) < 1e-12
    for words in ("do not add up", "keep their weights", "reproduces the run", "eval mode", "one rounding unit"):
        assert any(words in x for x in result.caveats), words


def test_what_is_stored_needs_no_recipe_and_no_training(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = effects(run.leave_out("source", examples.NAME))
    forbid(monkeypatch)
    again = effects(backstory.open(run.path).leave_out("source"))
    assert torch.equal(first.values, again.values)
    assert first.caveats == again.caveats
    with pytest.raises(UsageError, match="not stored in the run yet"):
        run.leave_out("epoch")
    with pytest.raises(UsageError, match="not stored in the run yet"):
        run.leave_out("source", others="renormalise")


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(*_: object) -> None:
        raise AssertionError("it is trained again")

    monkeypatch.setattr(Alone, "step", step)
    monkeypatch.setattr(Replicas, "step", step)


def test_the_model_is_left_as_it_was(run: Run) -> None:
    changes, recipe = run.leave_out("source", examples.NAME), examples.make(**ARGS)
    before = [p.detach().clone() for p in recipe.model.parameters()]
    changes.effects(recipe.model, recipe.loss, recipe.queries["q"])
    assert all(torch.equal(p, x) for p, x in zip(recipe.model.parameters(), before, strict=True))
    assert recipe.model.training


def test_all_checkpoints_without_stored_final_weights(run: Run, tmp_path: Path) -> None:
    path = shutil.copytree(run.path, tmp_path / "run")
    changes = Run(path).leave_out("source", examples.NAME, twins=0)
    expected, recipe = effects(changes), examples.make(**ARGS)
    run.load_weights(recipe.model)
    (path / f"checkpoint-{run.n_steps:08d}.safetensors").unlink()
    assert run.n_steps not in Run(path).checkpoints
    again = changes.effects(recipe.model, recipe.loss, recipe.queries["q"], "all")
    assert_same(again.values, expected.values, examples.TERMS)


def test_a_change_is_the_difference_of_the_weights(run: Run) -> None:
    changes = run.leave_out({"one": [3], "two": [5, 7]}, examples.NAME, twins=0)
    recipe = examples.make(**ARGS)
    examples.by_hand(recipe, {(t, i): 0.0 for t, gone in places([5, 7]).items() for i in gone})
    run_weights = run._store.load_checkpoint(8)
    for name, x in changes.change("two").items():
        expected = recipe.model.state_dict()[name] - run_weights[name]
        assert_same(x, expected, examples.TERMS, size=1.0)
    assert changes.groups == ("one", "two"), "samples in no group are not left out"
    with pytest.raises(UsageError, match="no group 'three'"):
        changes.change("three")
    with pytest.raises(UsageError, match="at the run's checkpoints"):
        changes.change("one", 1)


def test_a_group_that_comes_later_has_no_effect_before(run: Run) -> None:
    result = effects(run.leave_out("parts:2", examples.NAME, twins=0))
    assert result.first_steps == (0, 4)
    assert 3 in result.checkpoints or 2 in result.checkpoints
    early = [c for c, t in enumerate(result.checkpoints) if t <= 4]
    assert not result.values[1, early].any()
    assert result.values[1, -1].all()
    assert any("left empty still take an optimizer step" in x for x in result.caveats)
    skipped = effects(run.leave_out("parts:2", examples.NAME, twins=0, empty="skip"))
    assert any("left empty are skipped" in x for x in skipped.caveats)
    assert float((skipped.values - result.values).abs().max()) > 1e-6


def test_empty_steps_decide_only_where_there_are_some(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    first = effects(run.leave_out("source", examples.NAME))
    forbid(monkeypatch)
    assert torch.equal(effects(run.leave_out("source", empty="skip")).values, first.values)


def test_differences_below_rounding_are_marked(run: Run) -> None:
    result = effects(run.leave_out("source", examples.NAME), "final")
    loud = GroupEffects(**{**vars(result), "twins": 1e9 * result.twins.abs().clamp(min=1.0)})
    assert not bool(loud.clear.any())
    assert any("below rounding" in x for x in loud.words)
    assert "below rounding" in repr(loud)
    assert not any("below rounding" in x for x in result.words)


def test_another_precision_is_another_result(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", make=single)
    recipe = single()
    changes = run.leave_out({"x": [1]}, single, dtype=torch.float64, check=False)
    wide = changes.effects(recipe.model, recipe.loss, recipe.queries["q"])
    narrow = run.leave_out({"x": [1]}, single, check=False).effects(recipe.model, recipe.loss, recipe.queries["q"])
    assert {x.dtype for x in changes.change("x").values()} == {torch.float64}
    assert "computed in float64" in wide.caveats
    assert next(recipe.model.parameters()).dtype == torch.float32
    assert wide.floor is not None
    assert narrow.floor is not None
    assert float(wide.floor.max()) < 1e-6 < 1 / float(narrow.floor.max())
    torch.testing.assert_close(wide.values, narrow.values, rtol=1e-3, atol=1e-6)


def single() -> Recipe:
    recipe = examples.make("momentum")
    recipe.model.float()
    x, y = recipe.queries["q"]
    return Recipe(
        model=recipe.model, optimizer=recipe.optimizer, loss=recipe.loss, queries={"q": (x.float(), y)},
        batches=[(ids, (a.float(), b)) for ids, (a, b) in recipe.batches],
    )  # fmt: skip


def test_an_interrupted_call_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, steps = with_sources(tmp_path / "run"), list[int]()
    original = Alone.step

    def step(trained: Alone, t: int) -> None:
        steps.append(t)
        if len(steps) == 13:
            raise KeyboardInterrupt
        original(trained, t)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Alone, "step", step)
        run.leave_out("source", examples.NAME, twins=0)
    assert len(list((run.path / pieces.WORK).glob("change-*.safetensors"))) == 1, "one group was done"
    steps = [-1] * 99
    monkeypatch.setattr(Alone, "step", step)
    actual = effects(run.leave_out("source", examples.NAME, twins=0), "final")
    assert 99 < len(steps) <= 99 + 16
    base = losses_by_hand({}, 8)
    for g, ids in enumerate(SOURCES.values()):
        assert_same(actual.values[g, 0], losses_by_hand(places(ids), 8) - base, examples.TERMS, size=1.0)
    assert not (run.path / pieces.WORK).exists()


def test_pieces_of_workers_make_the_whole(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "spread", lambda work, jobs, workers: ((i, work(*x)) for i, x in enumerate(jobs)))
    seen: list[tuple[int, int]] = []
    other = with_sources(tmp_path / "run")
    actual = effects(other.leave_out("source", examples.NAME, workers=2, progress=lambda a, b: seen.append((a, b))))
    expected = effects(run.leave_out("source", examples.NAME))
    assert_same(actual.values, expected.values, examples.TERMS, size=1.0)
    assert seen == [(1, 2), (2, 2)]


def test_what_cannot_be_computed_is_refused(run: Run) -> None:
    with pytest.raises(MismatchError, match="the samples of step 0"):
        run.leave_out("epoch", lambda: examples.make(**ARGS, seed=3), check=False)
    with pytest.raises(UsageError, match="others must be one of"):
        run.leave_out("source", examples.NAME, others="drop")
    with pytest.raises(UsageError, match="twins must be"):
        run.leave_out("source", examples.NAME, twins=-1)
    changes, recipe = run.leave_out("source", examples.NAME), examples.make(**ARGS)
    with pytest.raises(UsageError, match="3 queries, but 1 names"):
        changes.effects(recipe.model, recipe.loss, recipe.queries["q"], queries=["one"])


def test_a_changed_file_is_noticed(tmp_path: Path) -> None:
    run = with_sources(tmp_path / "run")
    changes = run.leave_out({"x": [1]}, examples.NAME, twins=0)
    (file,) = run.path.glob("change-*.safetensors")
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 64
    file.write_bytes(bytes(whole))
    with pytest.raises(StoreError, match="checksum mismatch"):
        effects(changes)
    assert any("checksum mismatch" in x for x in run._store.verify())


def test_running_statistics_are_part_of_a_change(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", make=normalised)
    changes = run.leave_out({"x": [1, 2]}, normalised, twins=4, check=False)
    recipe = normalised()
    assert "1.mean" in changes.change("x")
    assert "1.count" not in changes.change("x")
    result = changes.effects(recipe.model, recipe.loss, recipe.queries["q"])
    base, without = (examples.by_hand(normalised(), gone) for gone in ({}, gone_by_hand([1, 2])))
    assert_same(result.values[0, 0], without - base, 4 * examples.TERMS, size=1.0)


def gone_by_hand(ids: list[int]) -> dict[tuple[int, int], float]:
    return {(t, i): 0.0 for t, (names, _) in enumerate(normalised().batches) for i, s in enumerate(names) if s in ids}


class Running(nn.Module):
    """Subtracts a running mean, which is part of what training leaves behind."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - self.mean


def normalised() -> Recipe:
    recipe = examples.make()
    g = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(3, 4), Running(4), nn.Linear(4, 2)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return Recipe(model=model, optimizer=optimizer, loss=recipe.loss, batches=recipe.batches, queries=recipe.queries)
