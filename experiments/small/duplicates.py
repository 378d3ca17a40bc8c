"""The study of copies: one sample, used early and used late, is worth two different amounts.

M samples of the run get one more occurrence in an early batch and one in a late batch, each copy under an id of its own.
Retraining without either copy is the truth. Methods that see only the trained model give both copies one number.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.baselines.influence import influence_function
from backstory.baselines.similarity import gradient_dot
from backstory.errors import UsageError
from backstory.replay.recipe import Recipe
from backstory.replay.tape import Removal
from experiments.baselines import PAPERS_DAMPING, post_hoc
from experiments.data.images import Setup, generator, mean_loss, recipe, split
from experiments.fidelity.full import influences, replayed
from experiments.fidelity.methods import EXACT, QUERY, ImageProblem, Row
from experiments.harness import STEPS, Say, Scores, Table, run_seeds
from experiments.statistics import mean, spearman

PART = 4  # early: the first quarter of the steps; late: the last
EARLY, LATE = 1_000_000, 2_000_000  # added to a sample's number: the copies' ids
RANK = 32  # of the influence function

Pair = tuple[Tensor, Tensor]  # values of the early and the late copies, (M,) each


def study(
    setup: Setup,
    seeds: Sequence[int],
    *,
    count: int = 20,
    rank: int = 16,
    cache: Path | None = None,
    say: Say | None = None,
) -> dict[str, Any]:
    """Truth and each method's values of all copies, one entry for each seed, and what they have in common."""
    problems, rows = (problem_of(setup, seed, count) for seed in seeds), methods(rank)
    results = run_seeds(problems, rows, ceiling=False, cache=cache, say=say)
    truth = [_pair(seed.truth) for seed in results]
    values = {row.name: [_pair(seed.rows[row.name].values) for seed in results] for row in rows}
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "copies": count,
        "truth": _sizes(truth),
        "rows": [_row(name, pairs, truth) for name, pairs in values.items()],
        "values": [
            {
                name: {"early": pairs[k][0].tolist(), "late": pairs[k][1].tolist()}
                for name, pairs in {"truth": truth, **values}.items()
            }
            for k in range(len(results))
        ],
    }


def with_copies(setup: Setup, seed: int, count: int) -> tuple[Recipe, list[int]]:
    """`(the run of the seed with two more occurrences of each chosen sample, the samples)`."""
    plan = recipe(setup, seed)
    train, steps = split(setup, seed)[0], len(plan.batches)
    part = steps // PART
    if not 1 < count <= len(train) or part < 1:
        raise UsageError(
            f"copies must be between 2 and {len(train)}, and the run must have {PART} or more steps, "
            f"got {count} copies and {steps} steps."
        )
    chosen = train[torch.randperm(len(train), generator=generator(seed, "duplicates"))[:count]].tolist()
    images = {i: (x, y) for ids, (xs, ys) in plan.batches for i, x, y in zip(ids, xs, ys, strict=True)}
    more: dict[int, list[tuple[int, int]]] = {}  # step -> (sample, what to add to its number)
    for k, sample in enumerate(chosen):
        early = k * part // count
        more.setdefault(early, []).append((sample, EARLY))
        more.setdefault(steps - part + early, []).append((sample, LATE))
    batches = [_longer(batch, more.get(t, []), images) for t, batch in enumerate(plan.batches)]
    return replace(plan, batches=batches), chosen


def _longer(batch: Any, more: Sequence[tuple[int, int]], images: dict[Any, tuple[Tensor, Tensor]]) -> Any:
    ids, (x, y) = batch
    if not more:
        return batch
    xs, ys = (torch.stack([images[sample][k] for sample, _ in more]) for k in range(2))
    return [*ids, *(sample + added for sample, added in more)], (torch.cat([x, xs]), torch.cat([y, ys]))


def problem_of(setup: Setup, seed: int, count: int) -> ImageProblem:
    """The run with copies; removed are the early ones, and the late ones."""
    chosen, replay = with_copies(setup, seed, count)[1], replayed(with_copies(setup, seed, count)[0])
    return ImageProblem(
        setup=setup, seed=seed, make=lambda: with_copies(setup, seed, count)[0],
        removals={"early": [Removal((i + EARLY,)) for i in chosen], "late": [Removal((i + LATE,)) for i in chosen]},
        loss=mean_loss, queries=replay.recipe.queries["test"], query=QUERY, recorded_in=torch.float64, replay=replay,
    )  # fmt: skip


def methods(rank: int) -> list[Row]:
    """All rows of the table."""

    def ours(problem: ImageProblem) -> Scores:
        made = problem.recording(curvature=EXACT, rank=rank, seed=problem.seed, **STEPS)
        return Scores(problem.of(made.run.query(made.model, problem.loss, problem.queries)))

    return [
        Row("exact unrolling", lambda p: Scores(p.of(p.exact()))),
        Row("full coordinates", lambda p: Scores(p.of_occurrences(influences(p.replay, "exact")))),
        Row(f"recorded, learned {rank}", ours),
        Row("influence function", lambda p: post_hoc(p, influence_function, damping=PAPERS_DAMPING, rank=RANK)),
        Row("gradient dot", lambda p: post_hoc(p, gradient_dot)),
    ]


def _pair(table: Table) -> Pair:
    return table["early"].flatten(), table["late"].flatten()


def _row(name: str, pairs: Sequence[Pair], truth: Sequence[Pair]) -> dict[str, Any]:
    """Correlations with the truth (0 where a method makes no difference), means and each seed's."""
    each: dict[str, list[float]] = {"early": [], "late": [], "difference": []}
    for (early, late), (true_early, true_late) in zip(pairs, truth, strict=True):
        each["early"].append(spearman(early, true_early))
        each["late"].append(spearman(late, true_late))
        same = _same(early, late)
        each["difference"].append(0.0 if same else spearman(late - early, true_late - true_early))
    return {
        "method": name,
        **{kind: mean(values) for kind, values in each.items()},
        **{f"{kind}_seeds": values for kind, values in each.items()},
        "one_number": all(_same(*pair) for pair in pairs),
        **_sizes(pairs),
    }


def _sizes(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Median |value| of the early and of the late copies, over all seeds."""
    sizes = [float(torch.cat([pair[k] for pair in pairs]).abs().median()) for k in range(2)]
    return {"early_size": sizes[0], "late_size": sizes[1]}


def _same(early: Tensor, late: Tensor) -> bool:
    """One number for both copies, but for rounding."""
    return bool(torch.allclose(early, late, rtol=1e-6, atol=1e-9 * float(late.abs().max())))
