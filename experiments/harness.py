r"""The skeleton of every study: problems, ground truth, methods, and how they agree.

    Problem    one seed's run: how to train it, what is removed, what is asked
    truth      training again without each removal                      (exact.leave_out, cached)
    ceiling    exact unrolling, the best that first order can do        (exact.reverse, cached)
    Method     a row of the table: a function from a problem to Scores
    Seed       all of these for one seed; agreement, intervals and paired differences over several
    thirds     of the run: the first, second and last third of its steps   (agreement in each: `experiments.thirds`)

A study says how its problems are made and which methods it has; `run_seeds` does the rest. A method with several settings
(a damping) either has one chosen on the even-numbered removals and is scored on the odd-numbered ones (`halves=True`), or leaves
the choice to the study.

Shapes:  n removals, Q queries, N occurrences.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from backstory.errors import NumericalError, UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QueryLoss
from backstory.exact.reverse import reverse
from backstory.recording.recorder import record
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal, in_precision, index, places
from backstory.results.influence import Influence
from backstory.run.gradients import LossFn
from backstory.run.run import Run
from experiments.statistics import Pair, agreement, difference, interval, mean

Say = Callable[[str, int, int], None]  # (stage, done, in all)
Table = dict[str, Tensor]  # set of removals -> (n, Q)
Weights = dict[str, Tensor]
CEILING = "ceiling"
THIRDS = 3


def silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody watches."""


STEPS: dict[str, Any] = {
    "curvature_of": "steps",
    "encoding": "float16",
}  # every occurrence keeps its own curvature samples


@dataclass(frozen=True)
class Training:
    """A run trained once, with nothing else going on."""

    recipe: Recipe  # its model is trained
    thirds: list[tuple[Weights, float]]  # weights after each third of the steps, and the rate of the step before
    seconds: float


@dataclass(frozen=True)
class Recording:
    """A recorded run while it is on disk."""

    run: Run
    model: nn.Module  # as trained
    seconds: float  # of the training with recording


@dataclass(kw_only=True, eq=False)
class Problem:
    """One seed's run: how to train it, what is removed from it, and what is asked. Its recordings live as long as its context."""

    setup: Any
    seed: int
    make: Callable[[], Recipe]
    removals: Mapping[str, Sequence[Removal]]  # sets of removals by name
    loss: LossFn  # (model, queries) -> (Q,), or a scalar
    queries: Any
    query: QueryLoss | None = None  # the same for exact replays, where these need another form
    dtype: torch.dtype | None = torch.float64  # of exact replays
    recorded_in: torch.dtype | None = None  # None: as the recipe says
    keep: int = 8  # recordings on disk at once
    cache: Path | None = None
    say: Say = silent
    notes: dict[str, Any] = field(default_factory=dict)  # what the study wants to know of the seed afterwards
    saved: float = 0.0  # seconds that a method did not spend because another one had
    clock: Callable[[], float] = time.perf_counter  # what seconds are read from
    _memo: dict[str, tuple[Any, float]] = field(default_factory=dict, repr=False)
    _runs: dict[str, tuple[tempfile.TemporaryDirectory[str], Recording]] = field(default_factory=dict, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._runs:
            self._forget()

    @cached_property
    def training(self) -> Training:
        """The run without recording."""
        return train(self.make(), self.clock)

    @property
    def trained(self) -> Recipe:
        """The recipe with its model trained."""
        return self.training.recipe

    def truth(self) -> Table:
        """How the queries' losses change by training again without each removal."""
        every = [removal for gone in self.removals.values() for removal in gone]
        rows = leave_out(
            self.make, every, self._query(), self._progress("retrain"), cache=self.cache, dtype=self.dtype
        )  # fmt: skip
        parts = rows.split([len(gone) for gone in self.removals.values()])
        return dict(zip(self.removals, parts, strict=True))

    def exact(self, dtype: torch.dtype | None = None) -> Influence:
        """Every occurrence's influence by exact unrolling, in the precision of exact replays or another one; computed once."""
        dtype, say = dtype or self.dtype, self._progress("unroll")
        made: Influence = self.once(
            f"exact {dtype}", lambda: reverse(self.make, self._query(), cache=self.cache, dtype=dtype, progress=say)
        )
        return made

    def of(self, answer: Influence, *, timeless: bool = False) -> Table:
        """Sums over what each removal takes away; `timeless`: over all occurrences of its samples."""
        return {
            name: torch.stack([answer.sum_over(r.samples, steps=None if timeless else r.steps) for r in gone])
            for name, gone in self.removals.items()
        }

    def of_occurrences(self, scores: Tensor) -> Table:
        """The same of scores (N,) in the order of the run."""
        return {
            name: torch.stack([scores[numbers].sum() for numbers in gone])[:, None]
            for name, gone in self._places.items()
        }

    def thirds(self) -> tuple[Tensor, dict[str, Tensor]]:
        """The third of the run of every occurrence (N,), and of each removal (n,): −1 where it spans several."""
        ids = [list(names) for names, _ in self.make().batches]
        uses = index(ids)
        of = [third_of(t, len(ids)) for t in range(len(ids))]

        def shared(removal: Removal) -> int:
            parts = {of[t] for t in places(removal, uses)}
            return parts.pop() if len(parts) == 1 else -1

        return (
            torch.tensor([of[t] for t, names in enumerate(ids) for _ in names]),
            {name: torch.tensor([shared(removal) for removal in gone]) for name, gone in self.removals.items()},
        )

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave when this name was first asked for; the time that this saves is counted."""
        if name in self._memo:
            value, seconds = self._memo[name]
            self.saved += seconds
            return value
        began = self.clock()
        value = make()
        self._memo[name] = value, self.clock() - began
        return value

    def recording(self, **settings: Any) -> Recording:
        """The same training with Backstory recording; made once while it is among the last `keep`."""
        name = repr(sorted(settings.items()))
        if name in self._runs:
            self.saved += self._runs[name][1].seconds
            return self._runs[name][1]
        while len(self._runs) >= self.keep:
            self._forget()
        plan = self.make() if self.recorded_in is None else in_precision(self.make(), self.recorded_in)
        folder = tempfile.TemporaryDirectory()
        began = self.clock()
        run = recorded(plan, Path(folder.name) / "run", **settings)
        self._runs[name] = folder, Recording(run, plan.model, self.clock() - began)
        return self._runs[name][1]

    def _forget(self) -> None:
        """Delete the oldest recording."""
        folder, _ = self._runs.pop(next(iter(self._runs)))
        folder.cleanup()

    def _query(self) -> QueryLoss:
        return self.query or (lambda model: self.loss(model, self.queries))

    def _progress(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.say(f"seed {self.seed}: {stage}", done, total)

    @cached_property
    def _places(self) -> dict[str, list[list[int]]]:
        """Of each removal, the numbers of its occurrences in the order of the run."""
        out: dict[str, list[list[int]]] = {name: [[] for _ in gone] for name, gone in self.removals.items()}
        start = 0
        for t, (ids, _) in enumerate(self.trained.batches):
            for name, gone in self.removals.items():
                for numbers, removal in zip(out[name], gone, strict=True):
                    if removal.steps is None or t in removal.steps:
                        numbers += [start + i for i, sample in enumerate(ids) if sample in removal.samples]
            start += len(ids)
        return out


P = TypeVar("P", bound=Problem)


@dataclass(frozen=True)
class Scores:
    """What one method predicts: a change for each removal and query."""

    values: Table
    settings: Mapping[str, Table] = field(default_factory=dict)  # of a swept method, to be chosen from
    about: Mapping[str, Any] = field(default_factory=dict)  # columns of the table that only the method knows
    cost: Mapping[str, float] = field(
        default_factory=dict
    )  # averaged over the seeds; seconds are measured if not given
    occurrences: Tensor | None = None  # (N, Q) in the order of the run, of a method that scores every single use


@dataclass(frozen=True)
class Method(Generic[P]):
    """A row of the table."""

    name: str
    scores: Callable[[P], Scores]
    about: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""  # rows that can be chosen by one name
    package: str | None = None  # that it needs
    obstacle: str = ""  # why it cannot run here
    default: bool = True  # False: only where it is named, for it takes minutes


@dataclass(frozen=True)
class Row:
    """One method on one seed: its scores, and which removals count."""

    values: Table
    counted: Tensor  # indices of the removals
    made: Scores
    chosen: dict[str, str] = field(default_factory=dict)  # set of removals -> the setting that was chosen


@dataclass
class Seed:
    """Everything about one seed that outlives its problem."""

    truth: Table
    rows: dict[str, Row] = field(default_factory=dict)  # the ceiling among them, where there is one
    failed: dict[str, str] = field(default_factory=dict)  # row -> why it has no numbers
    notes: dict[str, Any] = field(default_factory=dict)  # the problem's
    when: Tensor | None = None  # the third of the run of each occurrence (N,), where there is a ceiling
    removed: dict[str, Tensor] = field(default_factory=dict)  # set of removals -> the third of each (n,), −1: several

    def points(self, name: str, which: str) -> tuple[Tensor, Tensor]:
        """`(scores, truth)` of one row over the removals that count for it."""
        row = self.rows[name]
        return row.values[which][row.counted], self.truth[which][row.counted]

    def pair(self, ours: str, theirs: str, which: str) -> Pair:
        """Both rows on the removals that count for both."""
        a, b = self.rows[ours], self.rows[theirs]
        both = torch.tensor(sorted(set(a.counted.tolist()) & set(b.counted.tolist())))
        return Pair(self.truth[which][both], a.values[which][both], b.values[which][both])


def train(plan: Recipe, clock: Callable[[], float] = time.perf_counter) -> Training:
    """Train `plan` and keep its weights after each third of the steps."""
    total, thirds = len(plan.batches), []
    ends = {max(1, end) for end in third_ends(total)}
    began = clock()
    for t in range(total):
        rate = float(plan.optimizer.param_groups[0]["lr"])
        take_step(plan, t)
        if t + 1 in ends:
            thirds.append(({name: x.detach().clone() for name, x in plan.model.state_dict().items()}, rate))
    return Training(plan, thirds, clock() - began)


def third_ends(total: int) -> list[int]:
    """How many of `total` steps are over at the end of each third."""
    return [round(total * k / THIRDS) for k in range(1, THIRDS + 1)]


def third_of(step: int, total: int) -> int:
    """The third of the run in which a step lies: 0, 1 or 2."""
    return sum(step >= end for end in third_ends(total))


def recorded(plan: Recipe, path: Path, *, autocast: bool = False, **settings: Any) -> Run:
    """Train `plan` from where it is, recording into `path`, with `autocast` under bfloat16's; its model is trained afterwards."""
    if autocast:
        loss = plan.loss

        def rounded(model: nn.Module, batch: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(model, batch).float()

        plan = replace(plan, loss=rounded)
    with record(plan.model, plan.optimizer, path, loss_reduction=plan.loss_reduction, **settings) as rec:
        for t, (ids, batch) in enumerate(plan.batches):
            tokens = None if plan.tokens is None else plan.tokens(batch)
            with rec.step(ids, tokens=tokens) as step, step.outputs_of(plan.model, "cross-entropy"):
                take_step(plan, t)
    return Run(path)


def select(methods: Sequence[Method[P]], only: Sequence[str] | None) -> tuple[list[Method[P]], list[str]]:
    """`(the methods to run, in the table's order; why others are left out)`; `only` names rows or groups."""
    known = {m.name for m in methods} | {m.group for m in methods if m.group}
    if unknown := [name for name in only or () if name not in known]:
        names = dict.fromkeys(m.group or m.name for m in methods)
        raise UsageError(f"there is no method {unknown[0]!r}. Choose from {', '.join(names)}.")
    wanted = [m for m in methods if (m.default if only is None else {m.name, m.group} & set(only))]
    why = {m.name: _obstacle(m) for m in wanted}
    return [m for m in wanted if not why[m.name]], [f"{name}: {reason}" for name, reason in why.items() if reason]


def _obstacle(method: Method[P]) -> str:
    """Why a method cannot run here; "" where it can."""
    if method.package is not None and find_spec(method.package) is None:
        return f"{method.package} is not installed"
    return method.obstacle


def run_seeds(
    problems: Iterable[P],
    methods: Sequence[Method[P]],
    *,
    ceiling: bool = True,
    halves: bool = True,
    cache: Path | None = None,
    say: Say | None = None,
) -> list[Seed]:
    """Truth, ceiling and all methods of each problem; recordings are deleted when their problem is done."""
    out = []
    for problem in problems:
        problem.cache, problem.say = cache, say or silent
        with problem:
            out.append(run_seed(problem, methods, ceiling=ceiling, halves=halves))
    return out


def run_seed(problem: P, methods: Sequence[Method[P]], *, ceiling: bool, halves: bool) -> Seed:
    """One of them."""
    seed = Seed(problem.truth(), notes=problem.notes)
    if ceiling:
        exact, (seed.when, seed.removed) = problem.exact(), problem.thirds()
        made = Scores(problem.of(exact), occurrences=exact.scores.T)
        seed.rows[CEILING] = choose(made, seed.truth, halves=False)
    for done, method in enumerate(methods):
        try:
            seed.rows[method.name] = choose(timed(method, problem), seed.truth, halves=halves)
        except NumericalError as error:  # the literal recursion may expand without bound
            seed.failed[method.name] = f"{method.name}: seed {problem.seed}: {error}"
        problem.say(f"seed {problem.seed}: methods", done + 1, len(methods))
    return seed


def timed(method: Method[P], problem: P) -> Scores:
    """A method's scores, with the seconds that it would have taken alone."""
    problem.saved, began = 0.0, time.perf_counter()
    scores = method.scores(problem)
    seconds = time.perf_counter() - began + problem.saved
    return replace(scores, cost={"seconds": seconds, **scores.cost})


def choose(scores: Scores, truth: Table, *, halves: bool) -> Row:
    """With `halves`, the setting that agrees best on the even-numbered removals, to be scored on the odd-numbered ones."""
    n = len(next(iter(scores.values.values())))
    if not scores.settings or not halves:
        return Row(scores.values, torch.arange(n), scores)
    even = torch.arange(0, n, 2)

    def best(which: str) -> str:
        return max(scores.settings, key=lambda name: agreement(scores.settings[name][which][even], truth[which][even]))

    chosen = {which: best(which) for which in scores.values}
    values = {which: scores.settings[name][which] for which, name in chosen.items()}
    return Row(values, torch.arange(1, n, 2), scores, chosen)


def agreements(seeds: Sequence[Seed], name: str, which: str) -> dict[str, Any]:
    """A row's agreement with the truth: the mean over the seeds, each seed's, and the interval."""
    points = [seed.points(name, which) for seed in seeds]
    each = [agreement(*one) for one in points]
    lower, upper = interval(points)
    return {"mean": mean(each), "seeds": each, "interval": {"lower": lower, "upper": upper}}


def minus(seeds: Sequence[Seed], ours: str, theirs: str, which: str) -> dict[str, float]:
    """The paired difference of two rows, with its interval."""
    return bounded(difference([seed.pair(ours, theirs, which) for seed in seeds]))


def bounded(values: tuple[float, float, float]) -> dict[str, float]:
    """`(mean, lower, upper)` by their names."""
    return dict(zip(("mean", "lower", "upper"), values, strict=True))


def names_of_all(seeds: Sequence[Seed], methods: Sequence[Method[P]]) -> list[str]:
    """The methods that have numbers on every seed, in the table's order."""
    return [m.name for m in methods if all(m.name in seed.rows for seed in seeds)]


def costs(seeds: Sequence[Seed], name: str) -> dict[str, float]:
    """A row's figures of cost, averaged over the seeds."""
    first = seeds[0].rows[name].made.cost
    return {key: mean([seed.rows[name].made.cost[key] for seed in seeds]) for key in first}


def failures(seeds: Sequence[Seed]) -> list[str]:
    """Why rows have no numbers."""
    return [reason for seed in seeds for reason in seed.failed.values()]
