"""The study of what is kept: ranks, projections, curvature rows and warm-up, each against full coordinates and the truth.

Every cell records the same run again with its own settings and asks it. `full` is the rank correlation of all
occurrences' scores with full coordinates: the exact Gauss–Newton matrix for sampled and exact rows, the empirical Fisher
for empirical ones. `single` and `all` are those with retraining. Bytes are what one occurrence takes on disk.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QuerySet
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal, in_precision
from backstory.results.statistics import spearman
from experiments.data.images import Setup, mean_loss, recipe, removals
from experiments.fidelity.full import Replay, influences, replayed
from experiments.recorded import recorded

Say = Callable[[str, int, int], None]
KINDS = ("single", "all")
MEASURED = ("full", *KINDS)
QUERY = QuerySet("test", mean=True)
RANKS = (4, 8, 16, 32)
PROJECTIONS = ("learned", "random", "mask")
CURVATURES = ("empirical", "sampled:1", "sampled:4", "exact:10")
WARMUP = 20  # steps: the default of `record`
WARMUPS = ("20", "epoch")


@dataclass(frozen=True)
class Cell:
    """One way to record."""

    projection: str
    rank: int
    curvature: str
    warmup: str = ""  # a number of steps or "epoch"; only what is learned has one


@dataclass(frozen=True)
class Known:
    """What every cell of one seed is compared with."""

    truth: dict[str, Tensor]  # kind -> (n,)
    places: dict[str, list[list[int]]]  # kind -> of each removal, which occurrences it takes away
    full: dict[str, Tensor]  # "empirical" and "exact" -> (N,), all occurrences


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
    cells = list(grid(ranks, projections, curvatures, warmups))
    tell = say or (lambda stage, done, total: None)
    found = [_one_seed(setup, seed, cells, count, cache, tell) for seed in seeds]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "removals": count,
        "full": [_mean_row(rows, {"curvature": name}) for name, rows in _columns([full for full, _ in found])],
        "rows": [_mean_row([rows[k] for _, rows in found], asdict(cell)) for k, cell in enumerate(cells)],
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
            f"found {unknown or 'an empty list'}; expected projections among {', '.join(PROJECTIONS)}, warm-ups in steps or "
            "'epoch', and at least one of each."
        )
    for projection, rank, curvature in product(projections, ranks, curvatures):
        for warmup in warmups if projection == "learned" else ("",):
            yield Cell(projection, rank, curvature, warmup)


def _one_seed(
    setup: Setup, seed: int, cells: Sequence[Cell], count: int, cache: Path | None, say: Say
) -> tuple[dict[str, dict[str, float]], list[dict[str, float]]]:
    """`(rows of full coordinates by curvature, a row for each cell)`."""
    replay = replayed(recipe(setup, seed))
    known = _known(setup, seed, replay, count, cache, say)
    full = {name: _against(known, scores, name) for name, scores in known.full.items()}
    rows = []
    for done, cell in enumerate(cells):
        scores, bytes_ = _scores(setup, seed, cell)
        reference = "empirical" if cell.curvature == "empirical" else "exact"
        rows.append({**_against(known, scores, reference), "bytes": bytes_})
        say(f"seed {seed}: cells", done + 1, len(cells))
    return full, rows


def _known(setup: Setup, seed: int, replay: Replay, count: int, cache: Path | None, say: Say) -> Known:
    gone = dict(zip(KINDS, removals(setup, seed, count), strict=True))
    truth = leave_out(
        lambda: recipe(setup, seed), [*gone["single"], *gone["all"]], QUERY,
        lambda done, total: say(f"seed {seed}: retrain", done, total), cache=cache, dtype=torch.float64,
    )[:, 0]  # fmt: skip
    full = {"empirical": influences(replay, "empirical", form="auto"), "exact": influences(replay, "exact")}
    places = {kind: _places(replay.recipe, gone[kind]) for kind in KINDS}
    return Known(dict(zip(KINDS, truth.split(count), strict=True)), places, full)


def _scores(setup: Setup, seed: int, cell: Cell) -> tuple[Tensor, float]:
    """`(scores (N,) of all occurrences, bytes of one)`."""
    plan = in_precision(recipe(setup, seed), torch.float64)
    steps = len(plan.batches)
    warmup = steps // setup.epochs if cell.warmup == "epoch" else min(int(cell.warmup or WARMUP), steps)
    with tempfile.TemporaryDirectory() as folder:
        run = recorded(
            plan, Path(folder) / "run", curvature=cell.curvature, projection=cell.projection, rank=cell.rank, seed=seed,
            warmup_steps=warmup,
        )  # fmt: skip
        answer = run.query(plan.model, mean_loss, plan.queries["test"])
        return answer.scores.mean(0), float(run.store.bytes_per_row)


def _places(plan: Recipe, gone: Sequence[Removal]) -> list[list[int]]:
    """Of each removal, the numbers of its occurrences in the order of the run."""
    found: list[list[int]] = [[] for _ in gone]
    at = 0
    for t, (ids, _) in enumerate(plan.batches):
        for place, removal in zip(found, gone, strict=True):
            place += [at + i for i in removal.hits(t, ids)]
        at += len(ids)
    return found


def _against(known: Known, scores: Tensor, reference: str) -> dict[str, float]:
    """Correlations with full coordinates and with both truths."""
    row = {"full": spearman(scores, known.full[reference])}
    for kind in KINDS:
        row[kind] = spearman(torch.stack([scores[p].sum() for p in known.places[kind]]), known.truth[kind])
    return row


def _columns(full: Sequence[dict[str, dict[str, float]]]) -> list[tuple[str, list[dict[str, float]]]]:
    return [(name, [seed[name] for seed in full]) for name in full[0]]


def _mean_row(rows: Sequence[dict[str, float]], about: dict[str, Any]) -> dict[str, Any]:
    means = {kind: sum(row[kind] for row in rows) / len(rows) for kind in rows[0]}
    return {**about, **means, **{f"{kind}_seeds": [row[kind] for row in rows] for kind in MEASURED}}
