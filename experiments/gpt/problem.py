r"""What the rows of the GPT study share: the trained run, a recording of it, scores, and how they are compared.

    agreement = 1/4 Σ_d spearman(score of each removal on domain d, its truth)          of one seed

Its interval draws seeds with replacement, then removals within each seed, the same removals for all domains and, in a
difference, for both methods.

Shapes:  n removals, 4 domains, R resamples.
"""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstory.replay.recipe import Recipe, take_step
from backstory.results.influence import Influence
from backstory.results.statistics import spearman
from backstory.run.run import Run
from experiments import statistics as stats
from experiments.gpt.setups import GptSetup, recipe
from experiments.recorded import recorded as train_recorded

Settings = Mapping[str, Any]  # arguments of `record`; "seed" is the study's own unless they are empty
THIRDS = 3


@dataclass(frozen=True)
class Problem:
    """One seed's run, trained without recording, and the sequences that are removed."""

    setup: GptSetup
    seed: int
    samples: list[str]
    trained: Recipe
    thirds: list[tuple[dict[str, Tensor], float]]  # weights after each third of the steps, and the rate before
    seconds: float  # of the training
    memo: dict[str, Any] = field(default_factory=dict, repr=False)  # what two rows share

    @property
    def queries(self) -> Tensor:
        """The sequences that are asked about, (4, q, S + 1)."""
        found: Tensor = self.trained.queries["domains"]
        return found

    def of(self, answer: Influence) -> Tensor:
        """The scores of the removals, (n, queries)."""
        return torch.stack([answer.sum_over([s]) for s in self.samples])


@dataclass(frozen=True)
class Recording:
    """A recorded run while it is on disk."""

    run: Run
    model: nn.Module  # as trained
    seconds: float  # of the training with recording


@dataclass(frozen=True)
class Scores:
    """Predicted changes of one row; a swept method has one table for each setting, to be chosen from."""

    values: Tensor  # (n, 4)
    about: Mapping[str, Any]  # projection, curvature, groups, optimizer_model, dims
    seconds: float  # to ask
    recording_ratio: float | None = None
    bytes_per_occurrence: float | None = None
    settings: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Method:
    """A row of the table."""

    name: str
    run: Callable[[Problem, Recording | None], Scores]
    recording: Settings | None = None  # None: it needs the trained model only
    default: bool = False  # what `record` does where nothing is chosen


def trained(setup: GptSetup, seed: int, samples: list[str]) -> Problem:
    """Train the run of this seed once, with nothing else going on."""
    plan, total = recipe(setup, seed), setup.steps
    ends = {max(1, round(total * k / THIRDS)) for k in range(1, THIRDS + 1)}
    kept, began = [], time.perf_counter()
    for t in range(total):
        rate = float(plan.optimizer.param_groups[0]["lr"])
        take_step(plan, t)
        if t + 1 in ends:
            kept.append(({name: x.clone() for name, x in plan.model.state_dict().items()}, rate))
    return Problem(setup, seed, samples, plan, kept, time.perf_counter() - began)


@contextmanager
def recorded(problem: Problem, settings: Settings) -> Iterator[Recording]:
    """The same training with Backstory recording; the run is deleted afterwards."""
    plan = recipe(problem.setup, problem.seed)
    chosen = {"seed": problem.seed, **settings} if settings else {}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        run = train_recorded(plan, Path(folder) / "run", **chosen)
        yield Recording(run, plan.model, time.perf_counter() - began)


def agreement(scores: Tensor, truth: Tensor) -> float:
    """Mean over the domains of the rank correlation."""
    each = [spearman(x, y) for x, y in zip(scores.T, truth.T, strict=True)]
    return sum(each) / len(each)


def interval(points: Sequence[tuple[Tensor, Tensor]], *, draws: int = stats.DRAWS, seed: int = 0) -> dict[str, float]:
    """The 95 % bootstrap interval of the mean over seeds; `points` are (scores, truth) of each."""
    g = torch.Generator().manual_seed(seed)
    total = draws * len(points)
    resampled = [_resampled(scores, truth, stats.counts(len(truth), total, g)) for scores, truth in points]
    lower, upper = stats.bounds(torch.stack(resampled), g)
    return {"lower": lower, "upper": upper}


def difference(pairs: Sequence[stats.Pair], *, draws: int = stats.DRAWS, seed: int = 0) -> dict[str, float]:
    """Mean over seeds of agreement(ours) − agreement(theirs), and its 95 % paired bootstrap interval."""
    g = torch.Generator().manual_seed(seed)
    resampled = []
    for truth, ours, theirs in pairs:
        C = stats.counts(len(truth), draws * len(pairs), g)
        resampled.append(_resampled(ours, truth, C) - _resampled(theirs, truth, C))
    lower, upper = stats.bounds(torch.stack(resampled), g)
    exact = sum(agreement(p.ours, p.truth) - agreement(p.theirs, p.truth) for p in pairs) / len(pairs)
    return {"mean": exact, "lower": lower, "upper": upper}


def _resampled(scores: Tensor, truth: Tensor, C: Tensor) -> Tensor:
    """Agreements under resampling counts C (R, n): (R,)."""
    columns = zip(scores.T, truth.T, strict=True)
    return torch.stack([stats.weighted(stats.order(x), stats.order(y), C) for x, y in columns]).mean(0)
