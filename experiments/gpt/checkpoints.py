r"""How much is lost where a run was never recorded: rows from K checkpoints, beside the recording and retraining.

    agreement = mean over the domains of spearman(score of each removal, its truth)

The K checkpoints of a run of T steps lie at round(T k / K), k = 1 … K; "before" also has the run's start.
"""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from backstory.demo.gpt_model import counts
from backstory.recording.from_checkpoints import Given, record_checkpoints
from backstory.recording.recorder import record
from backstory.replay.recipe import Recipe, take_step
from backstory.run.run import Run
from experiments.gpt.methods import WHICH, problem_of
from experiments.gpt.setups import GptSetup, recipe
from experiments.harness import Problem, Say, silent
from experiments.statistics import agreement, mean

COUNTS = (5, 20, None)  # checkpoints; None: one after every step
RECORDED = "recorded"


class Row(NamedTuple):
    """One way to have a run."""

    checkpoints: int | None  # None: recorded while training
    nearest: str
    moments: bool  # whether the checkpoints hold Adam's second moments


def study(
    setup: GptSetup,
    seeds: Sequence[int],
    *,
    numbers: Sequence[int | None] = COUNTS,
    count: int = 40,
    rank: int = 16,
    cache: Path | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """Agreement with retraining of every way to have the run, for each seed and on average."""
    rows = list(_rows(setup, numbers))
    each: dict[Row, list[float]] = {row: [] for row in rows}
    for seed in seeds:
        problem = problem_of(setup, seed, count)
        problem.cache, problem.say = cache, say
        truth = problem.truth()[WHICH]
        for row, scores in _scores(problem, rows, rank):
            each[row].append(agreement(scores, truth))
    return {
        "study": "checkpoints",
        "mode": setup.mode,
        "steps": setup.steps,
        "rank": rank,
        "removals": count,
        "seeds": list(seeds),
        "rows": [{**row._asdict(), "mean": mean(x), "each": x} for row, x in each.items()],
    }


def _rows(setup: GptSetup, numbers: Sequence[int | None]) -> Iterator[Row]:
    yield Row(None, RECORDED, True)
    for number in numbers:
        n = setup.steps if number is None else min(number, setup.steps)
        yield from (Row(n, "after", True), Row(n, "before", True), Row(n, "after", False))


def _scores(problem: Problem, rows: Sequence[Row], rank: int) -> Iterator[tuple[Row, Tensor]]:
    """Predicted changes (removals, domains) of each row."""
    setup, seed = problem.setup, problem.seed
    settings: dict[str, Any] = {"rank": rank, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        plan, states = _trained(setup, seed, Path(folder) / RECORDED, settings)
        for i, row in enumerate(rows):
            problem.say(f"seed {seed}: runs", i, len(rows))
            if row.checkpoints is None:
                run = Run(Path(folder) / RECORDED)
            else:
                given = _some(states, row.checkpoints, row.moments)
                path = Path(folder) / f"{i}"
                run = record_checkpoints(recipe(setup, seed), given, path, nearest=row.nearest, **settings)
            yield row, problem.of(run.query(plan.model, problem.loss, problem.queries))[WHICH]
        problem.say(f"seed {seed}: runs", len(rows), len(rows))


def _trained(setup: GptSetup, seed: int, path: Path, settings: dict[str, Any]) -> tuple[Recipe, list[Given]]:
    """The trained and recorded run, and its state before the first and after every step."""
    plan = recipe(setup, seed)
    states = [_snapshot(0, plan)]
    with record(plan.model, plan.optimizer, path, loss_reduction=plan.loss_reduction, **settings) as rec:
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=counts(tokens)):
                take_step(plan, t)
            states.append(_snapshot(t + 1, plan))
    return plan, states


def _snapshot(t: int, plan: Recipe) -> Given:
    return t, copy.deepcopy(plan.model.state_dict()), copy.deepcopy(plan.optimizer.state_dict())


def _some(states: Sequence[Given], number: int, moments: bool) -> list[Given]:
    steps = len(states) - 1
    chosen = sorted({0} | {max(1, round(steps * k / number)) for k in range(1, number + 1)})
    return [states[t] if moments else (t, states[t][1], None) for t in chosen]
