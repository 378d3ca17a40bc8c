"""The study of what is kept: ranks, projections, curvature rows and warm-up, each against full coordinates and the truth.

Every cell records the same run again with its own settings and asks it. `full` is the rank correlation of all
occurrences' scores with full coordinates: the exact Gauss–Newton matrix for sampled and exact rows, the empirical Fisher
for empirical ones. `single` and `all` are those with retraining. Bytes are what one occurrence takes on disk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from torch import Tensor

from backstory.errors import UsageError
from backstory.store import RunStore
from experiments.data.images import Setup
from experiments.fidelity.full import influences
from experiments.fidelity.methods import KINDS, WARMUP, ImageProblem, Row, problem_of
from experiments.harness import STEPS, Say, Scores, Seed, run_seeds
from experiments.statistics import agreement, mean, spearman

RANKS = (4, 8, 16, 32)
PROJECTIONS = ("learned", "random", "mask")
CURVATURES = ("empirical", "sampled:1", "sampled:4", "exact:10")
WARMUPS = ("20", "epoch")
FORMS = {"empirical": "auto", "exact": "literal"}  # of full coordinates


@dataclass(frozen=True)
class Cell:
    """One way to record."""

    projection: str
    rank: int
    curvature: str
    warmup: str = ""  # a number of steps or "epoch"; only what is learned has one


def study(
    setup: Setup,
    seeds: Sequence[int],
    *,
    ranks: Sequence[int] = RANKS,
    projections: Sequence[str] = PROJECTIONS,
    curvatures: Sequence[str] = CURVATURES,
    warmups: Sequence[str] = WARMUPS[:1],
    count: int = 60,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """A row for each cell, and the full coordinates' own rows, as plain values."""
    full = [_full(curvature) for curvature in FORMS]
    cells = [_recorded(cell) for cell in grid(ranks, projections, curvatures, warmups)]
    problems = (problem_of(setup, seed, count) for seed in seeds)
    results = run_seeds(problems, [*full, *cells], ceiling=False, cache=cache, say=say)
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "full": [_row(method, results) for method in full],
        "rows": [{**_row(method, results), "bytes": _bytes(method, results)} for method in cells],
    }


def grid(
    ranks: Sequence[int], projections: Sequence[str], curvatures: Sequence[str], warmups: Sequence[str]
) -> Iterator[Cell]:
    """All cells; several warm-ups only where the projection is learned."""
    unknown = [s for s in projections if s not in PROJECTIONS] + [
        w for w in warmups if w != "epoch" and not w.isdigit()
    ]
    if unknown or not (ranks and projections and curvatures and warmups):
        raise UsageError(
            f"these are not settings of the ablation: {unknown or 'an empty list'}. Give one or more projections "
            f"({', '.join(PROJECTIONS)}) and warm-ups (a number of steps, or 'epoch')."
        )
    for projection, rank, curvature in product(projections, ranks, curvatures):
        for warmup in warmups if projection == "learned" else ("",):
            yield Cell(projection, rank, curvature, warmup)


def full_scores(problem: ImageProblem, curvature: str) -> Tensor:
    """All occurrences' scores (N,) in full coordinates."""
    scores: Tensor = problem.once(curvature, lambda: influences(problem.replay, curvature, form=FORMS[curvature]))
    return scores


def _full(curvature: str) -> Row:
    def scores(problem: ImageProblem) -> Scores:
        return Scores(problem.of_occurrences(full_scores(problem, curvature)), cost={"full": 1.0})

    return Row(f"full, {curvature}", scores, {"curvature": curvature})


def _recorded(cell: Cell) -> Row:
    def scores(problem: ImageProblem) -> Scores:
        steps = len(problem.trained.batches)
        warmup = steps // problem.setup.epochs if cell.warmup == "epoch" else min(int(cell.warmup or WARMUP), steps)
        made = problem.recording(
            curvature=cell.curvature, projection=cell.projection, rank=cell.rank, seed=problem.seed, warmup_steps=warmup, **STEPS
        )  # fmt: skip
        every = made.run.query(made.model, problem.loss, problem.queries).scores.mean(0)  # (N,)
        reference = full_scores(problem, "empirical" if cell.curvature == "empirical" else "exact")
        cost = {"full": spearman(every, reference), "bytes": float(RunStore.open(made.run.path).bytes_per_row)}
        return Scores(problem.of_occurrences(every), cost=cost)

    return Row(repr(cell), scores, asdict(cell))


def _row(method: Row, seeds: Sequence[Seed]) -> dict[str, Any]:
    """Correlations with full coordinates and with both truths: means, and each seed's."""
    each = {"full": [seed.rows[method.name].made.cost["full"] for seed in seeds]}
    each |= {kind: [agreement(*seed.points(method.name, kind)) for seed in seeds] for kind in KINDS}
    means = {kind: mean(values) for kind, values in each.items()}
    return {**method.about, **means, **{f"{kind}_seeds": values for kind, values in each.items()}}


def _bytes(method: Row, seeds: Sequence[Seed]) -> float:
    return mean([seed.rows[method.name].made.cost["bytes"] for seed in seeds])
