r"""How agreement changes over a run: by thirds of its steps, with exact unrolling and with retraining.

    against_exact       spearman(score, exact score) over all occurrences of a third
    size_against_exact  median |score| / median |exact score| over the same
    thirds              spearman(score, truth) over the removals of a third, with its bootstrap interval

Each is a mean over the queries, then over the seeds. The first two have thousands of points, but ask only how well a derivative is
approximated; the third is the truth, from a dozen removals a seed, so look at its interval. A removal belongs to a third when
all its uses lie there; one that spans several (a sample of every epoch) counts in none. With fewer than FEWEST points in
some seed there is no number, but None: a rank correlation of four points is one of few values.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.harness import CEILING, Seed
from experiments.statistics import agreement, interval, mean

PARTS = ("early", "middle", "late")
ALL = "all"
FEWEST = 5  # points of a rank correlation

Numbers = dict[str, float | None]  # by part


def against_exact(seeds: Sequence[Seed], name: str) -> dict[str, Any]:
    """A row's occurrences against exact unrolling's, in ranks and in sizes, and each seed's ranks; None without either."""
    pairs = [_occurrences(seed, name) for seed in seeds]
    if any(pair is None for pair in pairs):
        return {"against_exact": None, "against_exact_seeds": None, "size_against_exact": None}
    ranks = [{part: _rank(*points) for part, points in pair.items()} for pair in pairs if pair is not None]
    sizes = [{part: _size(*points) for part, points in pair.items()} for pair in pairs if pair is not None]
    return {
        "against_exact": _means(ranks),
        "against_exact_seeds": {part: [one[part] for one in ranks] for part in ranks[0]},
        "size_against_exact": _means(sizes),
    }


def _occurrences(seed: Seed, name: str) -> dict[str, tuple[Tensor, Tensor]] | None:
    """`(scores, exact scores)` of the occurrences of each part, (n, Q) each."""
    exact = seed.rows[CEILING].made.occurrences if CEILING in seed.rows else None
    scores = seed.rows[name].made.occurrences
    if exact is None or scores is None or seed.when is None:
        return None
    chosen = {part: torch.nonzero(seed.when == k)[:, 0] for k, part in enumerate(PARTS)}
    return {**{part: (scores[i], exact[i]) for part, i in chosen.items()}, ALL: (scores, exact)}


def _rank(scores: Tensor, exact: Tensor) -> float | None:
    return agreement(scores, exact) if len(scores) >= FEWEST else None


def _size(scores: Tensor, exact: Tensor) -> float | None:
    """The mean over the queries of the ratio of median sizes; None where the exact ones are 0."""
    if len(scores) < FEWEST:
        return None
    ours, theirs = (x.double().abs().quantile(0.5, 0) for x in (scores, exact))
    return float((ours / theirs).mean()) if bool((theirs > 0).all()) else None


def _means(each: Sequence[Mapping[str, float | None]]) -> Numbers:
    """Over the seeds; None where one has none."""
    known = {part: [one[part] for one in each] for part in each[0]}
    return {
        part: None if None in values else mean([x for x in values if x is not None]) for part, values in known.items()
    }


def retrained(seeds: Sequence[Seed], name: str, which: str) -> dict[str, dict[str, Any] | None]:
    """A row's agreement with retraining over the removals of each third that count for it."""
    return {part: _agreement([_removals(seed, name, which, k) for seed in seeds]) for k, part in enumerate(PARTS)}


def _removals(seed: Seed, name: str, which: str, third: int) -> tuple[Tensor, Tensor]:
    scores, truth = seed.points(name, which)
    inside = seed.removed[which][seed.rows[name].counted] == third
    return scores[inside], truth[inside]


def _agreement(points: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any] | None:
    counts = [len(truth) for _, truth in points]
    if min(counts) < FEWEST:
        return None
    each = [agreement(*one) for one in points]
    lower, upper = interval(points)
    return {"mean": mean(each), "seeds": each, "interval": {"lower": lower, "upper": upper}, "removals": counts}
