"""Retraining: against closed forms on a quadratic, and against hand-written loops."""

import importlib
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import NumericalError, UnsupportedError, UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.replay.tape import Removal, Tape

D = torch.float64
job = importlib.import_module("backstory.exact.leave_out")  # the package's `leave_out` is the function


def make(momentum: float = 0.9, clip: float | None = None, reduction: str = "mean") -> Recipe:
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(12, 3, generator=g, dtype=D), torch.randn(12, 1, generator=g, dtype=D)
    model = nn.Linear(3, 1, dtype=D)
    with torch.no_grad():
        model.weight.fill_(0.3)
        model.bias.fill_(-0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    order = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [0, 5, 10, 2]]

    def loss(m: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m(batch[0]), batch[1], reduction="none").squeeze(1)

    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=loss,
        batches=[(ids, (x[ids], y[ids])) for ids in order],
        clip_norm=clip,
        loss_reduction=reduction,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        queries={"one": (x[:1], y[:1])},
    )


def by_hand(removed: dict[int, set[int]], clip: float | None, reduction: str) -> float:
    """The same training as an ordinary loop, with the removed terms left out of the sum."""
    recipe = make(clip=clip, reduction=reduction)
    model = recipe.model
    for t, (ids, batch) in enumerate(recipe.batches):
        recipe.optimizer.zero_grad()
        losses = recipe.loss(model, batch)
        kept = [losses[i] for i, s in enumerate(ids) if int(s) not in removed.get(t, set())]
        (sum(kept, torch.zeros((), dtype=D)) / (len(ids) if reduction == "mean" else 1)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        recipe.optimizer.step()
        recipe.schedule.step()
    return float(recipe.loss(model, recipe.queries["one"]).detach())


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_removal_equals_a_hand_written_loop(clip: float | None, reduction: str) -> None:
    def query(model: nn.Module) -> Tensor:
        return make().loss(model, make().queries["one"])

    removals = [Removal((5,)), Removal((5,), steps=(3,)), Removal((0, 10)), Removal((11,))]
    gone = [{1: {5}, 3: {5}}, {3: {5}}, {0: {0}, 2: {10}, 3: {0, 10}}, {2: {11}}]
    actual = leave_out(lambda: make(clip=clip, reduction=reduction), removals, query)
    base = by_hand({}, clip, reduction)
    expected = torch.tensor([by_hand(r, clip, reduction) - base for r in gone], dtype=D)
    terms = 4 * ((3 + 1) + 1 + 4 + 4 + 4)  # 4 steps: forward, mean, both gradients, the norm
    assert_same(actual[:, 0], expected, terms, size=max(1.0, base))
    assert bool((actual.abs() > 1e-9).all())


def test_removing_what_never_occurred_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to remove"):
        leave_out(make, [Removal((99,))], lambda m: torch.zeros(1))


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    leave_out(make, [Removal((1,)), Removal((2,))], lambda m: torch.zeros(2), lambda a, b: seen.append((a, b)))
    assert seen == [(1, 2), (2, 2)]


def assert_rows(actual: Tensor, expected: Tensor) -> None:
    """Two trainings' differences of query losses, which are about 1: they round where the losses do."""
    assert_same(actual, expected, examples.TERMS, size=1.0)


def first_of(sample: int) -> int:
    return next(t for t, (ids, _) in enumerate(examples.make().batches) if sample in ids)


REMOVALS = [
    *(Removal((s,)) for s in range(5)),
    Removal((3,), steps=(first_of(3),)),
    Removal((1, 2, 7)),
    Removal((6,), share=0.3),
]
CASES = [
    ("sgd", None),
    ("decay", 0.3),
    ("momentum", None),
    ("momentum", 0.3),
    ("nesterov", None),
    ("adam", 0.3),
    ("adamw", None),
]


def expected_rows(fresh: partial[Recipe]) -> Tensor:
    """The removals above by the plainest loop there is."""
    base, rows = examples.by_hand(fresh(), {}), []
    occurrences = [(t, i, s) for t, (ids, _) in enumerate(fresh().batches) for i, s in enumerate(ids)]
    for r in REMOVALS:
        gone = [(t, i) for t, i, s in occurrences if s in r.samples and (r.steps is None or t in r.steps)]
        rows.append(examples.by_hand(fresh(), dict.fromkeys(gone, 1 - r.share)) - base)
    return torch.stack(rows)


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize(("kind", "clip"), CASES)
def test_stacked_equals_plain_equals_by_hand(kind: str, clip: float | None, schedule: bool) -> None:
    fresh = partial(examples.make, kind, clip, schedule)
    expected = expected_rows(fresh)
    for vectorised in (True, False):
        actual = leave_out(fresh, REMOVALS, "q", vectorised=vectorised)
        assert_rows(actual, expected)
    assert float(expected.abs().min()) > 1e-9


def test_dropout_draws_the_same_masks() -> None:
    fresh = partial(examples.make, "momentum", dropout=0.4)
    expected = expected_rows(fresh)
    for vectorised in (True, False):
        assert_rows(leave_out(fresh, REMOVALS, "q", vectorised=vectorised), expected)
    smooth = leave_out(partial(examples.make, "momentum"), REMOVALS, "q")
    assert not torch.allclose(smooth, expected), "dropout does nothing here, so this test says nothing"


def test_the_users_generator_is_left_alone() -> None:
    before = torch.get_rng_state()
    leave_out(partial(examples.make, dropout=0.4), REMOVALS[:2], "q")
    assert torch.equal(before, torch.get_rng_state())


def test_double_precision_of_a_single_precision_recipe() -> None:
    def single() -> Recipe:
        recipe = examples.make("adamw")
        recipe.model.float()
        halves = [(ids, (x.float(), y)) for ids, (x, y) in recipe.batches]
        x, y = recipe.queries["q"]
        return Recipe(model=recipe.model, optimizer=recipe.optimizer, loss=recipe.loss, batches=halves, queries={"q": (x.float(), y)})  # fmt: skip

    wide = leave_out(single, REMOVALS, "q", dtype=D)
    torch.testing.assert_close(wide, leave_out(partial(examples.make, "adamw"), REMOVALS, "q"), rtol=1e-3, atol=1e-6)
    narrow = leave_out(single, REMOVALS, "q")
    assert 0 < float((wide - narrow).abs().max()) < 1e-4


class Replays:
    """Counts the steps of replays, and can break off after some."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, until: int | None = None) -> None:
        self.steps, self.until = 0, until
        original = Tape.step

        def step(tape: Tape, t: int, w: Tensor | None = None) -> None:
            self.steps += 1
            if self.until is not None and self.steps > self.until:
                raise KeyboardInterrupt
            original(tape, t, w)

        monkeypatch.setattr(Tape, "step", step)


def test_a_killed_job_goes_on_and_a_finished_one_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    removals = [Removal((s,)) for s in range(6)]
    fresh = examples.whole  # a row is found by the bits of the run's weights, so they must repeat
    expected = leave_out(fresh, removals, "q", vectorised=False)
    with monkeypatch.context() as patch:
        whole = Replays(patch)
        leave_out(fresh, removals, "q", vectorised=False)
    with monkeypatch.context() as patch:
        Replays(patch, until=whole.steps // 2)
        with pytest.raises(KeyboardInterrupt):
            leave_out(fresh, removals, "q", cache=tmp_path, vectorised=False)
    kept = len(list(tmp_path.rglob("*.json")))
    assert 0 < kept < 6
    with monkeypatch.context() as patch:
        rest = Replays(patch)
        assert torch.equal(leave_out(fresh, removals, "q", cache=tmp_path, vectorised=False), expected)
    assert 0 < rest.steps < whole.steps
    with monkeypatch.context() as patch:
        none = Replays(patch)
        seen: list[tuple[int, int]] = []
        again = leave_out(fresh, removals, "q", lambda a, b: seen.append((a, b)), cache=tmp_path)
    assert torch.equal(again, expected)
    assert none.steps == 0
    assert seen[-1] == (6, 6)


def test_another_run_query_or_removal_never_meets_an_old_row(tmp_path: Path) -> None:
    for kind in ("sgd", "adamw"):
        for query in (QuerySet("q"), QuerySet("q", mean=True)):
            for removals in ([Removal((1,))], [Removal((1,), share=0.5)]):
                for activation in ("tanh", "relu"):
                    fresh = partial(examples.make, kind, activation=activation)
                    actual = leave_out(fresh, removals, query, cache=tmp_path)
                    assert_rows(actual, leave_out(fresh, removals, query))
    assert len(list(tmp_path.rglob("*.json"))) == 16


def test_removals_of_the_same_occurrences_share_a_row(tmp_path: Path) -> None:
    leave_out(examples.make, [Removal((1,)), Removal((1,), steps=tuple(range(8)))], "q", cache=tmp_path)
    assert len(list(tmp_path.rglob("*.json"))) == 1


@pytest.mark.slow
def test_worker_processes_give_the_same(tmp_path: Path) -> None:
    args = {"optimizer": "momentum", "dropout": 0.4}
    actual = leave_out(examples.NAME, REMOVALS, QuerySet("q"), args=args, workers=2, cache=tmp_path)
    assert_rows(actual, leave_out(examples.NAME, REMOVALS, "q", args=args))
    assert len(list(tmp_path.rglob("*.json"))) == len(REMOVALS)


def test_pieces_of_workers_make_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in one process: how the work is cut and put together again."""
    monkeypatch.setattr(job, "spread", lambda work, jobs, workers: ((i, work(*x)) for i, x in enumerate(jobs)))
    args = {"optimizer": "adamw"}
    seen: list[tuple[int, int]] = []
    actual = leave_out(examples.NAME, REMOVALS, "q", lambda a, b: seen.append((a, b)), args=args, workers=3)
    assert_rows(actual, leave_out(examples.NAME, REMOVALS, "q", args=args))
    assert seen[-1] == (len(REMOVALS), len(REMOVALS))


def test_what_workers_cannot_import_is_refused() -> None:
    with pytest.raises(UsageError, match="as 'package"):
        leave_out(examples.make, REMOVALS, "q", workers=2)
    with pytest.raises(UsageError, match="QuerySet"):
        leave_out(examples.NAME, REMOVALS, lambda m: torch.zeros(1), workers=2)


class Branch(nn.Linear):
    """Control flow that depends on the weights: torch.func cannot stack it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if float(self.weight.detach().sum()) > -1e9 else x


def test_what_cannot_be_stacked_is_replayed_plainly() -> None:
    def branched() -> Recipe:
        recipe = examples.make()
        model = Branch(3, 2, dtype=D)
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.fill_(0.2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return Recipe(
            model=model, optimizer=optimizer, loss=recipe.loss, batches=recipe.batches, queries=recipe.queries
        )

    actual = leave_out(branched, REMOVALS, "q")
    assert_rows(actual, expected_rows(partial(branched)))
    with pytest.raises(UnsupportedError, match="cannot be vectorised"):
        leave_out(branched, REMOVALS, "q", vectorised=True)


def test_an_optimizer_that_is_not_modelled_is_replayed_plainly() -> None:
    def other() -> Recipe:
        recipe = examples.make()
        optimizer = torch.optim.RMSprop(recipe.model.parameters(), lr=0.01)
        return Recipe(model=recipe.model, optimizer=optimizer, loss=recipe.loss, batches=recipe.batches, queries=recipe.queries)  # fmt: skip

    assert_rows(leave_out(other, REMOVALS, "q"), expected_rows(partial(other)))


def test_few_states_in_memory_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = leave_out(examples.make, REMOVALS, "q", vectorised=False)
    monkeypatch.setattr(Tape, "affordable", lambda tape: 2)
    for vectorised in (True, False):
        actual = leave_out(examples.make, REMOVALS, "q", vectorised=vectorised)
        assert_rows(actual, expected)


def test_a_replay_that_diverges_is_an_error() -> None:
    with pytest.raises(NumericalError, match="diverged"):
        leave_out(examples.make, [Removal((1,))], lambda m: torch.full((2,), float("nan")))


def test_no_removals_give_no_rows() -> None:
    assert leave_out(examples.make, [], "q").shape == (0, 3)


def test_the_positional_form_stays() -> None:
    assert list(inspect.signature(leave_out).parameters)[:4] == ["recipe", "removals", "query_loss", "progress"]
