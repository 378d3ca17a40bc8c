r"""A short trial recording, on copies and in a temporary folder: what a step costs in bytes and seconds.

Plain and recorded steps take turns, and the medians are compared; what is recorded is on disk before a turn ends. The
warm-up of a learned projection comes first and is timed apart. Of each table on disk

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
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import UsageError
from ..maths.projection import Shape
from ..replay.recipe import Recipe, take_step
from ..store import RunStore
from ..store.bases import PRECONDITIONED
from .recorder import Recorder, record
from .settings import Settings

BATCHES = 64  # of the recipe's, kept in memory so that loading them is not timed, and taken again and again
SINGLE_STEPS = 2  # committed alone, before the turns
TURN_STEPS = (4, 500)  # fewest and most in a turn; fewer only where one step alone takes as long as a turn may
Progress = Callable[[str, int, int], None]  # (stage, done, in all)


class Trial(NamedTuple):
    """What a short recording of the user's own training cost."""

    settings: Settings
    shapes: list[Shape]  # of each recorded parameter, as the warm-up has left it
    single: list[bool]  # whether each sample passes it once, at one position
    energy: float | None  # share of the warm-up's energy that is kept, where it decided the rank
    batch: float  # occurrences of a step
    letters: int  # of the longest id
    row_bytes: float  # of an occurrence, its curvature rows included
    step_bytes: float  # of a step beside its rows
    basis_bytes: int
    scale_bytes: int  # Adam's coordinates at one checkpoint
    other_bytes: float  # config, and what tables cost whatever their length
    model_bytes: int  # the weights of one checkpoint
    momentum: bool
    adaptive: bool  # Adam's second moment is followed
    clipped: float  # share of the steps that were clipped in Adam's coordinates
    coverage: float  # share of the squared gradient norm that is recorded
    plain_seconds: float  # a step
    recorded_seconds: float  # a step, once the projection is known
    warmup_steps: int
    warmup_seconds: float  # all of them and the learning of the projection
    opening_seconds: float
    closing_seconds: float  # files are joined then
    steps: int  # recorded in all
    store_bytes: int

    @property
    def dims(self) -> list[int]:
        """Numbers of each recorded parameter in a row."""
        return [shape.dims for shape in self.shapes]


class _Size(NamedTuple):
    """A table on disk."""

    files: int
    bytes: int
    lines: int


def copied(recipe: Recipe) -> Recipe:
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


def trial(
    recipe: Recipe,
    *,
    folder: str | Path | None,
    outputs: str,
    seconds: float,
    repeats: int,
    progress: Progress | None,
    settings: Settings,
) -> Trial:
    """Record `recipe` for a few steps; its model and optimizer stay as they are."""
    plain, recorded = copied(recipe), copied(recipe)
    with tempfile.TemporaryDirectory(prefix="backstory-plan-", dir=folder) as temporary:
        path, began = Path(temporary) / "run", time.perf_counter()
        with record(
            recorded.model,
            recorded.optimizer,
            path,
            loss_reduction=recipe.loss_reduction,
            clip_norm=recipe.clip_norm,
            settings=settings,
        ) as rec:
            course = _Course(rec, plain, recorded, outputs, progress)
            opened = time.perf_counter()
            course.warm_up()
            course.stand_still()
            course.single_steps()
            course.turns(seconds, repeats)
            ended = time.perf_counter()
        course.opening_seconds, course.closing_seconds = opened - began, time.perf_counter() - ended
        return _measured(path, course, sum(x.nbytes for x in recorded.model.state_dict().values()))


class _Course:
    """The steps of a trial, and what was seen of them."""

    def __init__(self, rec: Recorder, plain: Recipe, recorded: Recipe, outputs: str, progress: Progress | None) -> None:
        self.rec, self._plain, self._recorded, self._outputs = rec, plain, recorded, outputs
        self._say: Progress = progress or (lambda stage, done, total: None)
        self.batches, self._at = recorded.batches, {"plain": 0, "recorded": 0}
        self.seconds: dict[str, float] = {}  # a step, plain and recorded
        self.warmup_steps, self.warmup_seconds = 0, 0.0
        self.opening_seconds, self.closing_seconds = 0.0, 0.0
        self.first: dict[str, _Size] = {}  # the tables' files of one step

    def warm_up(self) -> None:
        """Until the projection is known; nothing where it is not learned."""
        self.plain_steps(1)  # what is slow at its first call is slow in both
        began, total = self._now(), self.rec.settings.warmup_steps
        while "basis" not in self.rec.store.tensor_names():
            self.recorded_steps(1)
            self.warmup_steps += 1
            self._say("warm-up", min(self.warmup_steps, total), total)
        self.warmup_seconds = self._now() - began if self.warmup_steps else 0.0

    def stand_still(self) -> None:
        """Both models stay where they are: trained on few batches again and again, they would be no typical ones."""
        for group in (*self._plain.optimizer.param_groups, *self._recorded.optimizer.param_groups):
            group["lr"] = 0 * group["lr"]

    def single_steps(self) -> None:
        """A few steps, each committed alone."""
        for _ in range(SINGLE_STEPS):
            before = _tables(self.rec.store)
            self.recorded_steps(1)
            self.rec.flush()
            pairs = zip(before.items(), _tables(self.rec.store).values(), strict=True)
            self.first = {name: _Size(*(b - a for a, b in zip(x, y, strict=True))) for (name, x), y in pairs}

    def turns(self, seconds: float, repeats: int) -> None:
        """Plain and recorded steps in turn, once untimed; the medians."""
        once = self._timed(self.plain_steps, 1)
        least, most = TURN_STEPS
        count = min(most, max(math.ceil(seconds / once), least if once < seconds else 1))
        times: dict[str, list[float]] = {"plain": [], "recorded": []}
        for turn in range(repeats + 1):
            for name, work in (("plain", self.plain_steps), ("recorded", self._durable_steps)):
                spent = self._timed(work, count)
                if turn:
                    times[name].append(spent / count)
            self._say("turns", turn + 1, repeats + 1)
        self.seconds = {name: statistics.median(x) for name, x in times.items()}

    def plain_steps(self, count: int) -> None:
        """Steps without recording."""
        for _ in range(count):
            take_step(self._plain, self._next("plain"))

    def recorded_steps(self, count: int) -> None:
        """Steps with recording."""
        recipe = self._recorded
        for _ in range(count):
            t = self._next("recorded")
            ids, batch = recipe.batches[t]
            tokens = [1] * len(ids) if recipe.tokens is None else recipe.tokens(batch)
            with self.rec.step(ids, tokens=tokens) as s, s.outputs_of(recipe.model, self._outputs, "sum"):
                take_step(recipe, t)

    def _durable_steps(self, count: int) -> None:
        self.recorded_steps(count)
        self.rec.flush()

    def _next(self, name: str) -> int:
        self._at[name] += 1
        return (self._at[name] - 1) % len(self.batches)

    def _timed(self, work: Callable[[int], None], count: int) -> float:
        began = self._now()
        work(count)
        return self._now() - began

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


def _measured(path: Path, course: _Course, model_bytes: int) -> Trial:
    """What the closed run holds, and the seconds of the course."""
    store = RunStore.open(path)
    table, n_steps, n_rows, size = store.steps(), store.n_steps(), store.n_rows(), store.size_bytes()
    each = {name: _each(size, course.first[name]) for name, size in _tables(store).items()}
    basis = (path / "basis.safetensors").stat().st_size
    scales = [file.stat().st_size for file in path.glob("scale-*.safetensors")]
    return Trial(
        settings=course.rec.settings,
        shapes=[Shape(*b["shape"]) for b in store.config["blocks"]],
        single=course.rec.watcher.single,
        energy=store.config.get("energy"),
        batch=n_rows / n_steps,
        letters=max(len(str(sample)) for ids, _ in course.batches for sample in ids),
        row_bytes=each["rows"],
        step_bytes=each["steps"],
        basis_bytes=basis,
        scale_bytes=max(scales, default=0),
        other_bytes=max(0.0, size - each["rows"] * n_rows - each["steps"] * n_steps - basis),
        model_bytes=model_bytes,
        momentum=bool(table.groups["momentum"].any()),
        adaptive=store.config["diagonal"] or store.config["optimizer"].get("coordinates") == PRECONDITIONED,
        clipped=float((table.clip < 1).mean())
        if store.config["optimizer"].get("coordinates") == PRECONDITIONED
        else 0.0,
        coverage=float(table.trained.mean()),
        plain_seconds=course.seconds["plain"],
        recorded_seconds=course.seconds["recorded"],
        warmup_steps=course.warmup_steps,
        warmup_seconds=course.warmup_seconds,
        opening_seconds=course.opening_seconds,
        closing_seconds=course.closing_seconds,
        steps=n_steps,
        store_bytes=size,
    )


def _tables(store: RunStore) -> dict[str, _Size]:
    """The two tables that grow with a run, as they are on disk."""
    lines = {"rows": store.n_rows(), "steps": store.n_steps()}
    sizes = {name: [f.stat().st_size for f in (store.path / f"{name}.lance" / "data").glob("*")] for name in lines}
    return {name: _Size(len(sizes[name]), sum(sizes[name]), count) for name, count in lines.items()}


def _each(whole: _Size, first: _Size) -> float:
    """b: bytes of a line, without what every file costs."""
    beyond = whole.lines - whole.files * first.lines
    if beyond <= 0 or first.files != 1:
        return whole.bytes / whole.lines
    return (whole.bytes - whole.files * first.bytes) / beyond
