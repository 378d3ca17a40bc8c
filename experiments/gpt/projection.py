"""The study of random projections: scores of all occurrences against those of the largest one, and against retraining."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from backstory.baselines.gradients import gradients
from backstory.baselines.influence import influence_function
from backstory.errors import UsageError
from backstory.results.influence import Influence
from experiments.baselines import PAPERS_DAMPING
from experiments.gpt.methods import WHICH, problem_of, recording
from experiments.gpt.setups import GptSetup
from experiments.harness import Problem, Say, silent
from experiments.statistics import agreement, interval, mean

RANKS = (16, 32, 48, 64)


@dataclass(frozen=True)
class Projected:
    """One projection on one seed."""

    dims: int
    largest: float  # rank correlation with the largest projection's scores, mean over the domains
    points: tuple[Tensor, Tensor]  # scores and truth of the removals


def study(
    setup: GptSetup,
    seeds: Sequence[int],
    *,
    ranks: Sequence[int] = RANKS,
    curvature: str = "auto",
    count: int = 40,
    cache: Path | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """Random projections of each rank against the largest and against the truth: Backstory's, and LoGRA's beside."""
    if len(ranks) < 2 or min(ranks) < 1:
        raise UsageError(f"ranks must be two or more numbers, each at least 1, got {list(ranks)}.")
    order, results = sorted(set(ranks)), []
    for seed in seeds:
        problem = problem_of(setup, seed, count)
        problem.cache, problem.say = cache, say
        with problem:
            results.append(_projected(problem, order, curvature))
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "curvature": curvature,
        "rows": [_row(results, method, rank) for method in ("backstory", "logra") for rank in order],
    }


def _projected(problem: Problem, ranks: Sequence[int], curvature: str) -> dict[tuple[str, int], Projected]:
    truth = problem.truth()[WHICH]
    answers: dict[tuple[str, int], tuple[Influence, int]] = {}
    for done, rank in enumerate(ranks):
        answers["backstory", rank] = _ours(problem, rank, curvature)
        answers["logra", rank] = _logra(problem, rank)
        problem.say(f"seed {problem.seed}: ranks", done + 1, len(ranks))
    out = {}
    for (method, rank), (answer, dims) in answers.items():
        largest = answers[method, ranks[-1]][0]
        points = problem.of(answer)[WHICH], truth
        out[method, rank] = Projected(dims, agreement(answer.scores.T, largest.scores.T), points)
    return out


def _ours(problem: Problem, rank: int, curvature: str) -> tuple[Influence, int]:
    made = recording(problem, {"projection": "random", "rank": rank, "curvature": curvature})
    return made.run.query(made.model, problem.loss, problem.queries), made.run.width


def _logra(problem: Problem, rank: int) -> tuple[Influence, int]:
    answer = influence_function(
        problem.trained, problem.queries, loss=problem.loss, damping=PAPERS_DAMPING, rank=rank, seed=problem.seed
    )
    return answer, gradients(problem.trained, rank=rank).width


def _row(seeds: Sequence[dict[tuple[str, int], Projected]], method: str, rank: int) -> dict[str, Any]:
    each = [seed[method, rank] for seed in seeds]
    largest, truth = [x.largest for x in each], [agreement(*x.points) for x in each]
    lower, upper = interval([x.points for x in each])
    return {
        "method": method,
        "rank": rank,
        "dims_per_layer": rank * rank,
        "dims": each[0].dims,
        "largest": mean(largest),
        "largest_seeds": largest,
        "truth": mean(truth),
        "truth_seeds": truth,
        "truth_interval": {"lower": lower, "upper": upper},
    }
