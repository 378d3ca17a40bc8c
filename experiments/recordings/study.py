"""How well recordings of a classifier rank its uses, beside exact derivatives of the same run: no retraining, so large nets are affordable.

For each seed: the exact influence of every use on the mean loss of the queries (a reverse sweep through the training itself), and that
of each recording. *single* is the rank correlation over the uses of the last epoch, *all* that over the samples' sums over all epochs.
CPU seconds are those of the training with the recording over those of the training alone, both in this process, one thread.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from backstory.exact.check import spearman
from backstory.recording.settings import Curvature
from backstory.results.influence import Influence
from backstory.store import RunStore
from experiments.data.images import Setup, mean_loss, recipe
from experiments.fidelity.methods import QUERY
from experiments.harness import STEPS, Problem, Say

RECORDED: dict[str, dict[str, Any]] = {
    "default": {},
    "fast": {"preset": "fast"},
    "best": {"preset": "best"},
    "learned-16-empirical": {"rank": 16, "curvature": "empirical", "warmup_steps": 20, **STEPS},
}


def study(
    setup: Setup, seeds: Sequence[int], *, only: Sequence[str] | None = None, say: Say | None = None
) -> dict[str, Any]:
    """The chosen recordings of each seed, as plain values."""
    names = list(only or RECORDED)
    each = [_of_seed(setup, seed, names, say) for seed in seeds]
    return {
        "setup": asdict(setup),
        "seeds": list(seeds),
        "rows": [{"recording": name, **_means([one[name] for one in each])} for name in names],
    }


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    numbers = {k: mean(row[k] for row in rows) for k, x in rows[0].items() if isinstance(x, float)}
    seeds = {f"{k}_seeds": [row[k] for row in rows] for k in ("single", "all")}
    return {**numbers, **seeds, "curvature": rows[0]["curvature"]}


def _of_seed(setup: Setup, seed: int, names: Sequence[str], say: Say | None) -> dict[str, dict[str, Any]]:
    told = say or (lambda stage, done, total: None)
    problem = Problem(
        setup=setup, seed=seed, make=lambda: recipe(setup, seed), removals={}, loss=mean_loss,
        queries=recipe(setup, seed).queries["test"], query=QUERY, clock=time.process_time, say=told,
    )  # fmt: skip
    with problem:
        plain, exact = problem.training.seconds, problem.exact(torch.float32)
        return {name: _row(problem, RECORDED[name], exact, plain) for name in names}


def _row(problem: Problem, settings: Mapping[str, Any], exact: Influence, plain: float) -> dict[str, Any]:
    steps = len(problem.make().batches)
    made = problem.recording(seed=problem.seed, steps=steps, **settings)
    result, store = made.run.query(made.model, problem.loss, problem.queries), RunStore.open(made.run.path)
    last = exact.steps >= steps - steps // problem.setup.epochs
    return {
        "single": spearman(_scores(result)[last], _scores(exact)[last]),
        "all": spearman(_sums(result), _sums(exact)),
        "cpu_ratio": made.seconds / plain,
        "passes": passes(store),
        "store_bytes": float(store.size_bytes(("checkpoint-",))),
        "curvature": store.config["settings"]["curvature"],
    }


def passes(store: RunStore) -> float:
    """Extra backward passes of a step, on average."""
    grid, form = store.grid, Curvature.parse(store.config["settings"]["curvature"])
    if grid is None:
        return float(form.passes)
    return form.passes * sum(map(grid.is_seen, range(store.n_steps()))) / store.n_steps()


def _scores(result: Influence) -> Tensor:
    return result.scores.mean(0)


def _sums(result: Influence) -> Tensor:
    ids, scores = result.per_sample()
    return scores.double().mean(0)[torch.tensor(sorted(range(len(ids)), key=lambda i: str(ids[i])))]
