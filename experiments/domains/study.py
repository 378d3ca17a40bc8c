r"""The study of sources: the matrix source × domain of every method against retraining without each source, or half of it.

    truth[s, d] = mean loss of domain d after training without (half of) source s − the same with it

The removed passages have weight 0; steps, batches and the weights of all others stay. Two matrices are compared by the rank correlation of their cells
(all; without the diagonal; and of the other sources within each domain), by the best scale and by signs:

    scale = Σ truth · score / Σ score²          1: sizes are right; below 1: the score is too large

Intervals draw seeds, then cells within each seed, with replacement: cells that share a source or a domain are not independent, so they are a little narrow.
Shapes:  S sources, D domains, S = D.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.errors import NumericalError, UsageError
from backstory.exact.leave_out import leave_out
from backstory.insight.sources import Sources
from backstory.results.statistics import spearman
from experiments.data.texts import PARTS, DomainSetup, recipe
from experiments.domains.methods import PAPERS_INFLUENCE, ROWS, Matrices, Problem, trained
from experiments.gpt.setups import domain_losses
from experiments.statistics import Pair, difference, interval

Say = Callable[[str, int, int], None]
REFERENCE, SWEPT = "tracin", "influence-best"


@dataclass
class Seed:
    """Everything about one seed."""

    names: list[str]
    truth: Matrices
    losses: Tensor  # (D,) at the end of the run
    rows: dict[str, Matrices] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # group of rows -> why it has no numbers
    said: dict[str, Sources] = field(default_factory=dict)


def study(
    setup: DomainSetup,
    seeds: Sequence[int],
    *,
    only: Sequence[str] | None = None,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Truth and every row's matrices for each seed, and how they agree, as plain values."""
    chosen, tell = select(only), say or (lambda stage, done, total: None)
    found = [one_seed(setup, seed, chosen, cache, tell) for seed in seeds]
    names = [n for n in found[0].rows if all(n in seed.rows for seed in found)]
    swept = [n for n in names if n.startswith("influence-")]
    shown = [n for n in names if n not in swept or n == PAPERS_INFLUENCE]
    rows = [{"method": n, **_compared(found, n)} for n in shown]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "domains": found[0].names,
        "losses": [seed.losses.tolist() for seed in found],
        "rows": rows + ([{"method": SWEPT, **_best(found, swept)}] if swept else []),
        "inside": {row: [_inside(seed, row) for seed in found] for row in found[0].said},
        "halves": [spearman(*(seed.truth[p].flatten() for p in PARTS)) for seed in found],
        "matrices": [_matrices(seed, shown) for seed in found],
        "failed": [f"{name}: {why}" for seed in found for name, why in seed.failed.items()],
    }


def select(only: Sequence[str] | None) -> list[str]:
    """The groups of rows to run, in the table's order."""
    if unknown := [name for name in only or () if name not in ROWS]:
        raise UsageError(f"found method {unknown[0]!r}; expected one of {', '.join(ROWS)}.")
    return [name for name in ROWS if only is None or name in only]


def one_seed(setup: DomainSetup, seed: int, chosen: Sequence[str], cache: Path | None, say: Say) -> Seed:
    """Train, retrain without each group, and ask every method."""
    problem = trained(setup, seed)
    with torch.no_grad():
        losses = domain_losses(problem.trained.model, problem.queries)
    found = Seed(problem.names, retrained(problem, cache, say), losses)
    for done, name in enumerate(chosen):
        try:
            found.rows.update(ROWS[name](problem))
        except NumericalError as error:  # the literal recursion may expand without bound
            found.failed[name] = str(error)
        say(f"seed {seed}: methods", done + 1, len(chosen))
    found.said.update(problem.said)
    return found


def retrained(problem: Problem, cache: Path | None, say: Say) -> Matrices:
    """The change of each domain's loss by retraining without each group."""
    groups = [problem.gone[p][s] for p in PARTS for s in problem.names]
    rows = leave_out(
        lambda: recipe(problem.setup, problem.seed), groups, lambda model: domain_losses(model, problem.queries),
        lambda done, total: say(f"seed {problem.seed}: retrain", done, total), cache=cache,
    )  # fmt: skip
    return dict(zip(PARTS, rows.chunk(len(PARTS)), strict=True))


def _compared(found: Sequence[Seed], name: str) -> dict[str, Any]:
    """Both parts of one row, beside TracIn where that was asked."""
    out: dict[str, Any] = {p: agreement([(seed.rows[name][p], seed.truth[p]) for seed in found]) for p in PARTS}
    if name != REFERENCE and all(REFERENCE in seed.rows for seed in found):
        for p in PARTS:
            out[p]["minus_tracin"] = _minus([_pair(seed, name, p) for seed in found])
    return out


def agreement(matrices: Sequence[tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """How (score, truth) of each seed agree, (S, D) each: means over the seeds, intervals, and each seed."""
    out: dict[str, Any] = {}
    for kind, cells in (("all", _flat), ("off", off_diagonal)):
        points = [(cells(score), cells(truth)) for score, truth in matrices]
        each = [spearman(*x) for x in points]
        lower, upper = interval(points)
        signs = [float((x.sign() == y.sign()).double().mean()) for x, y in points]
        out[kind] = {"mean": _mean(each), "lower": lower, "upper": upper, "seeds": each, "signs": _mean(signs)}
    for name, of in FIGURES.items():
        out[f"{name}_seeds"] = [of(*x) for x in matrices]
        out[name] = _mean(out[f"{name}_seeds"])
    return out


def scale(score: Tensor, truth: Tensor) -> float:
    """The factor that brings the scores closest to the truth; 0 where all scores are."""
    size = float(score.square().sum())
    return float((score * truth).sum()) / size if size else 0.0


def within_domains(score: Tensor, truth: Tensor) -> float:
    """Mean over the domains of the rank correlation of all sources but the domain's own."""
    others = ~torch.eye(len(score), dtype=torch.bool)
    each = [spearman(score[others[:, d], d], truth[others[:, d], d]) for d in range(score.shape[1])]
    return _mean(each)


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


def _flat(matrix: Tensor) -> Tensor:
    return matrix.flatten()


def _pair(seed: Seed, name: str, part: str) -> tuple[Tensor, Tensor, Tensor]:
    return seed.truth[part], seed.rows[name][part], seed.rows[REFERENCE][part]


def _minus(triples: Sequence[tuple[Tensor, Tensor, Tensor]]) -> dict[str, Any]:
    """Differences to the other method, with their paired intervals."""
    out = {}
    for kind, cells in (("all", _flat), ("off", off_diagonal)):
        pairs = [Pair(*(cells(x) for x in triple)) for triple in triples]
        out[kind] = dict(zip(("mean", "lower", "upper"), difference(pairs), strict=True))
    return out


def _best(found: Sequence[Seed], names: Sequence[str]) -> dict[str, Any]:
    """The setting with the highest mean correlation over all cells, for each part: chosen with the truth in hand."""
    out = {}
    for part in PARTS:
        rows = {n: _compared(found, n)[part] for n in names}
        best = max(rows, key=lambda n: rows[n]["all"]["mean"])
        out[part] = {**rows[best], "chosen": best}
    return out


def _inside(seed: Seed, row: str) -> float:
    """Share of the cells whose truth lies in the 95 % interval that `insight.sources` gave."""
    told, count = seed.said[row], 0
    for cells in told.cells:
        for cell in cells:
            truth = float(seed.truth["whole"][seed.names.index(cell.source), seed.names.index(cell.domain)])
            count += cell.low <= truth <= cell.high
    return count / len(seed.names) ** 2


def _matrices(seed: Seed, names: Sequence[str]) -> dict[str, Any]:
    tables = {"truth": seed.truth, **{n: seed.rows[n] for n in names}}
    return {n: {p: table[p].tolist() for p in PARTS} for n, table in tables.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
