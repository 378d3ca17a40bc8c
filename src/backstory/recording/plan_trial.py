r"""A short trial recording, on copies and in a temporary folder: what a step costs in bytes and seconds.

Plain and recorded steps take turns, and the medians are compared; what is recorded is on disk before a turn ends. Seconds are
CPU seconds of all threads, so that other work on the machine counts for little (on a GPU they are those of the clock), all of them shortened
as those of plain steps are by torch's threads. The
warm-up of a learned projection comes first and is timed apart. Where steps share curvature by windows, a turn is one whole window, steps
that give rows and steps that give none, and its closing is timed apart. Windows that would take too long are made shorter, of m steps, those that
give rows among them where possible; the n − m others of a planned one give none:

    step = (m s + (n − m) u + c) / n          s a step of a short window, u one that gives no rows, c in proportion to the window's rows

Of each table on disk

    bytes = a · files + b · lines            b from two sizes: a commit of one step, and the whole table once it is closed

so that b holds for long runs, where files are joined. What is left of the trial's folder is fixed: basis, config.
After the warm-up the learning rate is 0, so that what is timed stays as it is at the start of training.
Assumes: batches cost about the same; the schedule of the learning rate, which does not matter here, is left out.
"""

import copy
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..capture.hooks import logits_of
from ..errors import UsageError
from ..maths.projection import Shape
from ..replay.recipe import Recipe, take_step
from ..store import RunStore
from ..store.bases import is_preconditioned
from .recorder import Recorder, record
from .replays import checkpoint_bytes
from .settings import Settings
from .step import StepScope

BATCHES = 64  # of the recipe's, kept in memory so that loading them is not timed, and taken again and again
SINGLE_STEPS = 2  # committed alone, before the turns
TURN_STEPS = (4, 500)  # fewest and most in a turn; fewer only where one step alone takes as long as a turn may
ROOM = 4  # whole windows may take so many times the seconds of all turns
Progress = Callable[[str, int, int], None]  # (stage, done, in all)


class Trial(NamedTuple):
    """What a short recording of the user's own training cost."""

    settings: Settings
    shapes: list[Shape]  # of each recorded parameter, as the warm-up has left it
    single: list[bool]  # whether each sample passes it once, at one position
    energy: float | None  # share of the warm-up's energy that is kept, where it decided the rank
    batch: float  # occurrences of a step
    row_bytes: float  # of an occurrence, its curvature rows included
    step_bytes: float  # of a step beside its rows
    basis_bytes: int
    scale_bytes: int  # the optimizer's coordinates at one checkpoint
    other_bytes: float  # config, and what tables cost whatever their length
    model_bytes: int  # the weights of one checkpoint
    state_bytes: int  # the state of training that lies beside them
    closed_bytes: int  # of the trial's own run, with its final weights
    momentum: bool
    adaptive: bool  # a second moment is followed
    clipped: float  # share of the steps that were clipped in the optimizer's own coordinates
    coverage: float  # share of the squared gradient norm that is recorded
    letters: int  # of the longest id
    warmup_steps: int
    learning_seconds: float  # of all warm-up steps and the learning of the projection
    plain_seconds: float  # a step
    recorded_seconds: float  # a step, once the projection is known; where steps share curvature, on average over `window_steps` of them
    unseen_seconds: float  # one that gives no rows for it
    window_steps: int  # of a window of the trial
    window_seconds: float  # to close a window of the planned run
    opening_seconds: float
    closing_seconds: float  # files are joined then


class _Size(NamedTuple):
    """A table on disk."""

    files: int
    bytes: int
    lines: int


def trial(
    recipe: Recipe,
    settings: Settings,
    *,
    steps: int,
    folder: str | Path | None,
    outputs: str,
    seconds: float,
    repeats: int,
    progress: Progress | None,
) -> Trial:
    """Record `recipe` for a few steps, as a run of so many `steps` would be; its model and optimizer stay as they are."""
    say = progress or (lambda stage, done, total: None)
    plain, copied = _Steps(_copied(recipe)), _copied(recipe)
    with tempfile.TemporaryDirectory(prefix="backstory-plan-", dir=folder) as temporary:
        path, times = Path(temporary) / "run", [_now()]
        with record(
            copied.model, copied.optimizer, path, loss_reduction=recipe.loss_reduction, clip_norm=recipe.clip_norm, settings=settings, steps=steps
        ) as rec:  # fmt: skip
            times.append(_now())
            plain.take(1)  # what is slow at its first call is slow in both
            recorded, began = _Steps(copied, rec, outputs), _now()
            while "basis" not in rec.store.tensor_names():
                recorded.take(1)
                say("warm-up", min(recorded.taken, settings.warmup_steps), settings.warmup_steps)
            warmup_steps, warmup = recorded.taken, _now() - began if recorded.taken else 0.0
            for group in (*plain.recipe.optimizer.param_groups, *copied.optimizer.param_groups):
                group["lr"] = 0 * group["lr"]  # few batches, again and again, would make no typical model
            first = _commit_of_a_step(recorded, rec.store)
            cost = _steps_cost(plain, recorded, rec, seconds, repeats, say)
            times.append(_now())
        measured = _measured(
            path, rec, first, warmup_steps=warmup_steps, learning_seconds=warmup,
            opening_seconds=times[1] - times[0], closing_seconds=_now() - times[2], **cost,
            letters=max(len(str(sample)) for ids, _ in copied.batches for sample in ids),
        )  # fmt: skip
        seconds_of = [name for name in Trial._fields if name.endswith("_seconds")]
        return measured._replace(**{name: plain.pace * getattr(measured, name) for name in seconds_of})


def _copied(recipe: Recipe) -> Recipe:
    """The same training on copies of model and optimizer, its first batches in memory, its schedule at a stand."""
    try:
        model, optimizer = copy.deepcopy((recipe.model, recipe.optimizer))
    except Exception as error:
        raise UsageError(
            f"the recipe's model and optimizer cannot be copied ({error}), and plan() trains only copies. Remove what "
            "copy.deepcopy rejects, such as attributes that hold tensors with a grad_fn."
        ) from error
    batches = list(islice((recipe.batches[t] for t in range(len(recipe.batches))), BATCHES))
    if not batches:
        raise UsageError("the recipe has no batches. plan() needs at least one for its trial.")
    return replace(recipe, model=model, optimizer=optimizer, batches=batches, schedule=None)


class _Steps:
    """Takes the steps of a recipe, its batches again and again; with a recorder they are on disk afterwards."""

    def __init__(self, recipe: Recipe, rec: Recorder | None = None, outputs: str = "") -> None:
        self.recipe, self._rec, self._outputs, self.taken = recipe, rec, outputs, 0
        self._clock = self._used = 0.0
        self.window: tuple[int, int] | None = None  # steps of one, and how many of them give rows, evenly spread

    def take(self, count: int) -> None:
        """So many more."""
        recipe, rec = self.recipe, self._rec
        for t in range(self.taken, self.taken + count):
            place = t % len(recipe.batches)
            if rec is None:
                take_step(recipe, place)
                continue
            ids, batch = recipe.batches[place]
            if self.window is not None:
                rec.sees = t * self.window[1] % self.window[0] < self.window[1]
            tokens = [1] * len(ids) if recipe.tokens is None else recipe.tokens(batch)
            groups = None if recipe.groups is None else recipe.groups(batch)
            with rec.step(ids, tokens=tokens, groups=groups) as s, self._handed_over(s, torch.as_tensor(tokens)):
                take_step(recipe, place)
        self.taken += count
        if rec is not None:
            rec.flush()

    def _handed_over(self, scope: StepScope, tokens: Tensor) -> AbstractContextManager[object]:
        """Hand over the model's outputs; which positions have a loss makes no difference in cost, only how many."""
        if scope.curvature is None or scope.watched:
            return nullcontext()

        def take(module: nn.Module, args: Any, out: Any) -> None:
            logits, mask = logits_of(out), None
            if logits.dim() > 2:
                mask = torch.arange(logits.shape[1]).expand(len(logits), -1) < tokens.reshape(-1, 1)
            scope.outputs(logits, self._outputs, None if mask is None else mask.to(logits.device), "sum")

        return self.recipe.model.register_forward_hook(take)

    def timed(self, count: int) -> float:
        """The seconds that they take."""
        began, at = _now(), time.perf_counter()
        self.take(count)
        took = _now() - began
        self._clock, self._used = self._clock + time.perf_counter() - at, self._used + took
        return took

    @property
    def pace(self) -> float:
        """Seconds of the clock for one of `timed`, where several threads of torch share the work; 1 for a single one, however busy the machine."""
        return min(1.0, self._clock / self._used) if self._used else 1.0


def _commit_of_a_step(recorded: _Steps, store: RunStore) -> dict[str, _Size]:
    """What a commit of one step adds to each table."""
    for _ in range(SINGLE_STEPS):
        before = _tables(store)
        recorded.take(1)
    return {
        name: _Size(*(b - a for a, b in zip(before[name], after, strict=True)))
        for name, after in _tables(store).items()
    }


def _steps_cost(
    plain: _Steps, recorded: _Steps, rec: Recorder, seconds: float, repeats: int, say: Progress
) -> dict[str, Any]:
    """Seconds of a plain step, of recorded ones, and of closing a window."""
    once, grid, room = plain.timed(1), rec.store.grid, ROOM * seconds * repeats
    count = _turn_steps(once, seconds)
    if grid is None:
        times = _turns(plain, recorded, count, repeats, say)
        return {"plain_seconds": times.plain, "recorded_seconds": times.recorded, "unseen_seconds": times.recorded, "window_steps": 0, "window_seconds": 0.0}  # fmt: skip
    both, (lo, hi) = once + recorded.timed(1), grid.window(recorded.taken)
    n = min(hi - lo, max(1, int(room / both)))
    rec.hold_windows()
    recorded.window = n, min(n, grid.seen)
    times = _turns(
        plain, recorded, n, min(repeats, max(1, int(room / (n * both)))), say, pieces=-(-n // count), rec=rec
    )
    unseen = times.recorded
    if n < hi - lo:
        recorded.window = n, 0
        beside = _turns(plain, recorded, count, repeats, say)
        unseen = beside.recorded * times.plain / beside.plain
    closing = times.closing * min(grid.seen, hi - lo) / min(grid.seen, n)
    return {"plain_seconds": times.plain, "recorded_seconds": times.recorded, "unseen_seconds": unseen, "window_steps": n, "window_seconds": closing}  # fmt: skip


class _Times(NamedTuple):
    """Seconds of a step, and of closing a window."""

    plain: float
    recorded: float
    closing: float


def _turn_steps(once: float, seconds: float) -> int:
    least, most = TURN_STEPS
    return min(most, max(math.ceil(seconds / max(once, 1e-9)), least if once < seconds else 1))


def _turns(
    plain: _Steps,
    recorded: _Steps,
    count: int,
    repeats: int,
    say: Progress,
    *,
    pieces: int = 1,
    rec: Recorder | None = None,
) -> _Times:
    """By turns of `count` steps, in `pieces`, the first of several untimed; the medians. With `rec`, each ends with the closing of a window."""
    times, ends = list[_Times](), [k * count // pieces for k in range(pieces + 1)]
    for turn in range(repeats + (repeats > 1)):
        both = [(plain.timed(hi - lo), recorded.timed(hi - lo)) for lo, hi in pairwise(ends)]
        began = _now()
        if rec is not None:
            rec.store.windows.settle(rec.store.n_steps(), end=True)
        closing = _now() - began
        times.append(_Times(sum(p for p, _ in both) / count, sum(r for _, r in both) / count, closing))
        say("turns", turn + 1, repeats + (repeats > 1))
    return _Times(*map(statistics.median, zip(*times[len(times) > 1 :], strict=True)))


def _now() -> float:
    """CPU seconds of all threads; on a machine with a GPU those of the clock."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def _measured(path: Path, rec: Recorder, first: dict[str, _Size], **others: Any) -> Trial:
    """What the closed run holds."""
    store = RunStore.open(path)
    table, n_steps, n_rows, size = store.steps(), store.n_steps(), store.n_rows(), store.size_bytes(("checkpoint-",))
    tables, drawn = _tables(store), sum(map(len, store.random_states(0, 1).values()))
    tables["steps"] = tables["steps"]._replace(bytes=tables["steps"].bytes - drawn)  # the first step's random states
    each = {name: _each(size, first[name]) for name, size in tables.items()}
    basis, own_coordinates = (path / "basis.safetensors").stat().st_size, is_preconditioned(store)
    return Trial(
        settings=rec.settings,
        shapes=[Shape(*b["shape"]) for b in store.config["blocks"]],
        single=rec.watcher.single,
        energy=store.config.get("energy"),
        batch=n_rows / n_steps,
        row_bytes=each["rows"],
        step_bytes=each["steps"],
        basis_bytes=basis,
        scale_bytes=max((file.stat().st_size for file in path.glob("scale-*.safetensors")), default=0),
        other_bytes=max(0.0, size - each["rows"] * n_rows - each["steps"] * n_steps - basis - _window_bytes(path)),
        model_bytes=(weights := sum(x.nbytes for x in rec.model.state_dict().values())),
        state_bytes=checkpoint_bytes(rec.model, rec.watcher.reader.optimizer) - weights,
        closed_bytes=store.size_bytes(),
        momentum=bool(table.groups["momentum"].any()),
        adaptive=store.config["diagonal"] or own_coordinates,
        clipped=float((table.clip < 1).mean()) if own_coordinates else 0.0,
        coverage=float(table.trained.mean()),
        **others,
    )


def _tables(store: RunStore) -> dict[str, _Size]:
    """The two tables that grow with a run, as they are on disk."""
    lines = {"rows": store.n_rows(), "steps": store.n_steps()}
    sizes = {name: [f.stat().st_size for f in (store.path / f"{name}.lance" / "data").glob("*")] for name in lines}
    return {name: _Size(len(sizes[name]), sum(sizes[name]), count) for name, count in lines.items()}


def _window_bytes(path: Path) -> int:
    """What windows, and rows that waited for them, take of the trial's folder."""
    return sum(file.stat().st_size for pattern in ("curvature-*", "window/*") for file in path.glob(pattern))


def _each(whole: _Size, first: _Size) -> float:
    """b: bytes of a line, without what every file costs."""
    beyond = whole.lines - whole.files * first.lines
    if beyond <= 0 or first.files != 1:
        return whole.bytes / whole.lines
    return (whole.bytes - whole.files * first.bytes) / beyond
