r"""The study of sources: the matrix source × domain of every method against retraining without each source, or half of it.

    truth[s, d] = mean loss of domain d after training without (half of) source s − the same with it

The removed passages have weight 0; steps, batches and the weights of all others stay. Two matrices are compared by the rank correlation of their cells
(all; without the diagonal; and of the other sources within each domain), by the best scale and by signs:

    scale = Σ truth · score / Σ score²          1: sizes are right; below 1: the score is too large

Intervals draw seeds, then cells within each seed, with replacement: cells that share a source or a domain are not independent, so they are a little narrow.
Shapes:  S sources, D domains, S = D.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.data.texts import PARTS, DomainSetup
from experiments.domains.methods import SOURCES, methods, problem_of
from experiments.harness import Say, Seed, bounded, failures, names_of_all, run_seeds, select
from experiments.statistics import Pair, difference, interval, mean, spearman

REFERENCE, SWEPT = "tracin", "influence-best"


def study(
    setup: DomainSetup,
    seeds: Sequence[int],
    *,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Truth and every row's matrices for each seed, and how they agree, as plain values."""
    chosen, _ = select(methods(), only)
    problems = (problem_of(setup, seed) for seed in seeds)
    results = run_seeds(problems, chosen, ceiling=False, halves=False, cache=cache, say=say)
    names = names_of_all(results, chosen)
    shown = [name for name in names if name != SWEPT]
    first = results[0].notes
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "domains": first["names"],
        "losses": [seed.notes["losses"].tolist() for seed in results],
        "rows": [{"method": n, **(_best(results, n) if n == SWEPT else _row(results, n))} for n in names],
        "inside": {row: [share_inside(seed, row) for seed in results] for row in first[SOURCES]},
        "halves": [spearman(*(seed.truth[p].flatten() for p in PARTS)) for seed in results],
        "matrices": [_matrices(seed, shown) for seed in results],
        "failed": failures(results),
    }


def _row(seeds: Sequence[Seed], name: str) -> dict[str, Any]:
    return {p: compared(seeds, p, [seed.rows[name].values[p] for seed in seeds], name != REFERENCE) for p in PARTS}


def compared(seeds: Sequence[Seed], part: str, scores: Sequence[Tensor], paired: bool = True) -> dict[str, Any]:
    """How one row's matrices agree with the truth; where TracIn was asked too, their difference to it."""
    truth = [seed.truth[part] for seed in seeds]
    out = agreement(list(zip(scores, truth, strict=True)))
    if paired and all(REFERENCE in seed.rows for seed in seeds):
        theirs = [seed.rows[REFERENCE].values[part] for seed in seeds]
        pairs = [Pair(*three) for three in zip(truth, scores, theirs, strict=True)]
        out["minus_tracin"] = {
            kind: bounded(difference([Pair(*map(cells, pair)) for pair in pairs])) for kind, cells in CELLS.items()
        }
    return out


def agreement(matrices: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How (score, truth) of each seed agree, (S, D) each: means over the seeds, intervals, and each seed."""
    out: dict[str, Any] = {}
    for kind, cells in CELLS.items():
        points = [(cells(score), cells(truth)) for score, truth in matrices]
        each = [spearman(*x) for x in points]
        lower, upper = interval(points)
        signs = [float((x.sign() == y.sign()).double().mean()) for x, y in points]
        out[kind] = {"mean": mean(each), "lower": lower, "upper": upper, "seeds": each, "signs": mean(signs)}
    for name, of in FIGURES.items():
        out[f"{name}_seeds"] = [of(*x) for x in matrices]
        out[name] = mean(out[f"{name}_seeds"])
    return out


def scale(score: Tensor, truth: Tensor) -> float:
    """The factor that brings the scores closest to the truth; 0 where all scores are."""
    size = float(score.square().sum())
    return float((score * truth).sum()) / size if size else 0.0


def within_domains(score: Tensor, truth: Tensor) -> float:
    """Mean over the domains of the rank correlation of all sources but the domain's own."""
    others = ~torch.eye(len(score), dtype=torch.bool)
    each = [spearman(score[others[:, d], d], truth[others[:, d], d]) for d in range(score.shape[1])]
    return mean(each)


def large_signs(score: Tensor, truth: Tensor) -> float:
    """Share of right signs among the half of the cells whose truth is largest in size."""
    large = truth.abs() >= truth.abs().median()
    return float((score.sign() == truth.sign())[large].double().mean())


def best_other(score: Tensor, truth: Tensor) -> float:
    """Share of the domains whose most helpful source beside their own is the right one."""
    own = torch.eye(len(score), dtype=torch.bool)
    best = [x.masked_fill(own, -torch.inf).argmax(0) for x in (score, truth)]
    return float((best[0] == best[1]).double().mean())


FIGURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "within": within_domains,
    "scale": scale,
    "large_signs": large_signs,
    "best_other": best_other,
}


def off_diagonal(matrix: Tensor) -> Tensor:
    """The cells where source and domain differ, (S² − S,)."""
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


CELLS: dict[str, Callable[[Tensor], Tensor]] = {"all": torch.flatten, "off": off_diagonal}


def _best(seeds: Sequence[Seed], name: str) -> dict[str, Any]:
    """The setting with the highest mean correlation over all cells, for each part: chosen with the truth in hand."""
    out = {}
    for part in PARTS:
        tables = {
            s: [seed.rows[name].made.settings[s][part] for seed in seeds] for s in seeds[0].rows[name].made.settings
        }
        rows = {setting: compared(seeds, part, scores) for setting, scores in tables.items()}
        best = max(rows, key=lambda setting: rows[setting]["all"]["mean"])
        out[part] = {**rows[best], "chosen": best}
    return out


def share_inside(seed: Seed, row: str) -> float:
    """Share of the cells whose truth lies in the 95 % interval that `insight.sources` gave."""
    names, count = seed.notes["names"], 0
    for cells in seed.notes[SOURCES][row].cells:
        for cell in cells:
            truth = float(seed.truth["whole"][names.index(cell.source), names.index(cell.domain)])
            count += cell.low <= truth <= cell.high
    return count / len(names) ** 2


def _matrices(seed: Seed, names: Sequence[str]) -> dict[str, Any]:
    tables = {"truth": seed.truth, **{n: seed.rows[n].values for n in names}}
    return {n: {p: table[p].tolist() for p in PARTS} for n, table in tables.items()}
