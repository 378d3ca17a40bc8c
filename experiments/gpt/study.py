"""The GPT study: every method's scores against retraining on four query domains, and the study of random projections.

For each seed: retrain without each removed sequence (truth), unroll exactly (ceiling), ask every row, correlate the ranks
on each domain and take the mean of the four. A swept setting is chosen on the even-numbered removals and scored on the
odd-numbered ones. The projection study compares the scores of all occurrences with those of the largest projection.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from backstory.baselines.gradients import gradients
from backstory.baselines.influence import influence_function
from backstory.errors import NumericalError, UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.reverse import reverse
from backstory.results.influence import Influence
from backstory.results.statistics import spearman
from experiments.gpt.methods import PAPERS_DAMPING, methods
from experiments.gpt.problem import (
    Method,
    Problem,
    Recording,
    Scores,
    agreement,
    difference,
    interval,
    recorded,
    trained,
)
from experiments.gpt.setups import GptSetup, domain_losses, draw, recipe, removals
from experiments.statistics import Pair

Say = Callable[[str, int, int], None]
REFERENCE = "paper"
RANKS = (16, 32, 48, 64)
OTHERS = ("influence-1e-3", "influence-swept")
CONTRASTS = (
    *((ours, other) for ours in ("default", "full-empirical/12", "full-empirical/6") for other in OTHERS),
    ("full-empirical/6", "full-empirical/6-expanding"),
    ("full-sampled-1/6", "full-sampled-1/6-expanding"),
    ("learned-16-empirical/6", "learned-16-empirical/6-expanding"),
    ("learned-16-sampled-1/6", "learned-16-empirical/6"),
    ("default-compressed", "default"),
    ("int8-compressed", "default-compressed"),
    ("default", "random-32-empirical/6"),  # the store that others are measured by
    ("learned-auto-0.9-empirical/6", "learned-16-empirical/6"),
    ("learned-auto-0.95-empirical/6", "learned-16-empirical/6"),
    ("default-compressed", "random-32-empirical/6"),
    ("int8-compressed", "random-32-empirical/6"),
    ("full-empirical/6-compressed", "full-empirical/6"),
    ("full-sampled-1/6-compressed", "full-sampled-1/6"),
    ("learned-16-sampled-1/6-compressed", "learned-16-sampled-1/6"),
    ("learned-16-empirical/6", "learned-16-empirical/6-per-layer"),
    ("learned-16-empirical/6", "random-16-empirical/6"),
    ("learned-16-empirical/6-int8", "learned-16-empirical/6"),
)


@dataclass(frozen=True)
class Seen:
    """One row on one seed: its scores, and which removals count."""

    scores: Tensor  # (n, 4)
    counted: Tensor  # indices of the removals
    made: Scores
    chosen: str = ""  # the setting that was chosen


@dataclass
class Seed:
    """Everything about one seed."""

    truth: Tensor  # (n, 4)
    ceiling: Tensor
    methods: dict[str, Seen] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # row -> why it has no numbers

    def points(self, name: str | None) -> tuple[Tensor, Tensor]:
        """`(scores, truth)` of one row over the removals that count for it; None: of the ceiling."""
        if name is None:
            return self.ceiling, self.truth
        seen = self.methods[name]
        return seen.scores[seen.counted], self.truth[seen.counted]

    def pair(self, ours: str, theirs: str) -> Pair:
        """Both rows on the removals that count for both."""
        a, b = self.methods[ours], self.methods[theirs]
        both = torch.tensor(sorted(set(a.counted.tolist()) & set(b.counted.tolist())))
        return Pair(self.truth[both], a.scores[both], b.scores[both])


def study(
    setup: GptSetup,
    seeds: Sequence[int],
    *,
    count: int = 40,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Truth, ceiling and the chosen rows, for each seed, as plain values."""
    chosen, tell = select(only), say or (lambda stage, done, total: None)
    found = [one_seed(setup, seed, count, chosen, cache, tell) for seed in seeds]
    failed = {name: f"{name}: {why}" for seed in found for name, why in seed.failed.items()}
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "rows": [_row(method, found) for method in chosen if method.name not in failed],
        "ceiling": _agreements(found, None),
        "contrasts": _contrasts(found),
        "failed": list(failed.values()),
    }


def select(only: Sequence[str] | None) -> list[Method]:
    """The rows to run, in the table's order."""
    known = {m.name: m for m in methods()}
    unknown = [name for name in only or () if name not in known]
    if unknown:
        raise UsageError(f"found method {unknown[0]!r}; expected one of {', '.join(known)}.")
    return [m for m in known.values() if only is None or m.name in only]


def one_seed(setup: GptSetup, seed: int, count: int, chosen: Sequence[Method], cache: Path | None, say: Say) -> Seed:
    """Truth, ceiling and all rows of one seed."""
    truth, problem = _known(setup, seed, count, cache, say)
    exact = reverse(
        lambda: recipe(setup, seed), _asker(setup, seed), cache=cache,
        progress=lambda done, total: say(f"seed {seed}: unroll", done, total),
    )  # fmt: skip
    out = Seed(truth, problem.of(exact))
    for settings, rows in groupby(chosen, key=lambda m: m.recording):
        part = list(rows)
        if settings is None:
            _ask_all(out, part, problem, None)
        else:
            with recorded(problem, settings) as made:
                _ask_all(out, part, problem, made)
        say(f"seed {seed}: methods", len(out.methods) + len(out.failed), len(chosen))
    return out


def _known(setup: GptSetup, seed: int, count: int, cache: Path | None, say: Say) -> tuple[Tensor, Problem]:
    """`(truth (n, 4), the trained run)`."""
    gone = removals(setup, seed, count)
    truth = leave_out(
        lambda: recipe(setup, seed), gone, _asker(setup, seed),
        lambda done, total: say(f"seed {seed}: retrain", done, total), cache=cache, dtype=torch.float64,
    )  # fmt: skip
    return truth, trained(setup, seed, [str(r.samples[0]) for r in gone])


def _asker(setup: GptSetup, seed: int) -> Callable[[nn.Module], Tensor]:
    queries = draw(setup, seed).queries
    return lambda model: domain_losses(model, queries)


def _ask_all(out: Seed, rows: Sequence[Method], problem: Problem, made: Recording | None) -> None:
    for method in rows:
        try:
            out.methods[method.name] = _seen(method.run(problem, made), out.truth)
        except NumericalError as error:
            out.failed[method.name] = f"seed {problem.seed}: {error}"


def _seen(scores: Scores, truth: Tensor) -> Seen:
    n = len(truth)
    if not scores.settings:
        return Seen(scores.values, torch.arange(n), scores)
    even = torch.arange(0, n, 2)
    best = max(scores.settings, key=lambda name: agreement(scores.settings[name][even], truth[even]))
    return Seen(scores.settings[best], torch.arange(1, n, 2), scores, best)


def _row(method: Method, found: Sequence[Seed]) -> dict[str, Any]:
    seen = [seed.methods[method.name] for seed in found]
    paired = method.name != REFERENCE and all(REFERENCE in seed.methods for seed in found)
    return {
        "method": method.name,
        **seen[0].made.about,
        **_agreements(found, method.name),
        "against_paper": difference([seed.pair(method.name, REFERENCE) for seed in found]) if paired else None,
        "recording_ratio": _mean([s.made.recording_ratio for s in seen]),
        "bytes_per_occurrence": _mean([s.made.bytes_per_occurrence for s in seen]),
        "seconds": _mean([s.made.seconds for s in seen]),
        "removals_counted": len(seen[0].counted),
        "chosen": [s.chosen for s in seen] if seen[0].chosen else None,
        "default": method.default,
    }


def _contrasts(found: Sequence[Seed]) -> list[dict[str, Any]]:
    """Paired differences of rows that were both run, on the removals that count for both."""
    there = set.intersection(*(set(seed.methods) for seed in found))
    return [
        {"method": a, "against": b, **difference([seed.pair(a, b) for seed in found])}
        for a, b in CONTRASTS
        if {a, b} <= there
    ]


def _agreements(found: Sequence[Seed], name: str | None) -> dict[str, Any]:
    """The mean over the seeds, each seed's own, and the interval; of one row, or of the ceiling."""
    points = [seed.points(name) for seed in found]
    each = [agreement(*one) for one in points]
    return {"mean": sum(each) / len(each), "seeds": each, "interval": interval(points)}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [x for x in values if x is not None]
    return sum(known) / len(known) if known else None


def projection(
    setup: GptSetup,
    seeds: Sequence[int],
    *,
    ranks: Sequence[int] = RANKS,
    curvature: str = "auto",
    count: int = 40,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Random projections of each rank against the largest and against the truth: Backstory's, and LoGRA's beside."""
    if len(ranks) < 2 or min(ranks) < 1:
        raise UsageError(f"found ranks={list(ranks)}; expected two or more, each at least 1.")
    order, tell = sorted(set(ranks)), say or (lambda stage, done, total: None)
    found = [_projected(setup, seed, order, curvature, count, cache, tell) for seed in seeds]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "curvature": curvature,
        "rows": [_projection_row(found, method, rank) for method in ("backstory", "logra") for rank in order],
    }


@dataclass(frozen=True)
class Projected:
    """One projection on one seed."""

    dims: int
    largest: float  # rank correlation with the largest projection's scores, mean over the domains
    points: tuple[Tensor, Tensor]  # scores and truth of the removals


def _projected(
    setup: GptSetup, seed: int, ranks: Sequence[int], curvature: str, count: int, cache: Path | None, say: Say
) -> dict[tuple[str, int], Projected]:
    truth, problem = _known(setup, seed, count, cache, say)
    answers: dict[tuple[str, int], tuple[Influence, int]] = {}
    for done, rank in enumerate(ranks):
        answers["backstory", rank] = _ours(problem, rank, curvature)
        answers["logra", rank] = _logra(problem, rank)
        say(f"seed {seed}: ranks", done + 1, len(ranks))
    return {
        (method, rank): Projected(dims, _same_order(answer, answers[method, ranks[-1]][0]), (problem.of(answer), truth))
        for (method, rank), (answer, dims) in answers.items()
    }


def _ours(problem: Problem, rank: int, curvature: str) -> tuple[Influence, int]:
    with recorded(problem, {"projection": "random", "rank": rank, "curvature": curvature}) as made:
        return made.run.query(made.model, domain_losses, problem.queries), made.run.store.width


def _logra(problem: Problem, rank: int) -> tuple[Influence, int]:
    answer = influence_function(
        problem.trained, problem.queries, loss=domain_losses, damping=PAPERS_DAMPING, rank=rank, seed=problem.seed
    )
    return answer, gradients(problem.trained, rank=rank).width


def _same_order(ours: Influence, largest: Influence) -> float:
    """Over all occurrences, mean over the domains."""
    each = [spearman(x, y) for x, y in zip(ours.scores, largest.scores, strict=True)]
    return sum(each) / len(each)


def _projection_row(found: Sequence[dict[tuple[str, int], Projected]], method: str, rank: int) -> dict[str, Any]:
    own = [seed[method, rank] for seed in found]
    largest, truth = [p.largest for p in own], [agreement(*p.points) for p in own]
    return {
        "method": method,
        "rank": rank,
        "dims_per_layer": rank * rank,
        "dims": own[0].dims,
        "largest": sum(largest) / len(largest),
        "largest_seeds": largest,
        "truth": sum(truth) / len(truth),
        "truth_seeds": truth,
        "truth_interval": interval([p.points for p in own]),
    }
