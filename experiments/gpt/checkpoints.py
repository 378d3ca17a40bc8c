r"""How much is lost where a run was never recorded: rows from K checkpoints, beside the recording and retraining.

    agreement = mean over the domains of spearman(score of each removal, its truth)

The K checkpoints of a run of T steps lie at round(T k / K), k = 1 … K; "before" also has the run's start.
"""

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backstory.demo.gpt_model import counts
from backstory.exact.leave_out import leave_out
from backstory.recording.from_checkpoints import Given, record_checkpoints
from backstory.recording.recorder import record
from backstory.replay.recipe import Recipe, take_step
from backstory.replay.tape import Removal
from backstory.run.run import Run
from experiments.gpt.setups import GptSetup, domain_losses, draw, recipe, removals
from experiments.statistics import spearman

Say = Callable[[str, int, int], None]
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
    say: Say = lambda stage, done, total: None,
) -> dict[str, Any]:
    """Agreement with retraining of every way to have the run, for each seed and on average."""
    rows = list(_rows(setup, numbers))
    found: dict[Row, list[float]] = {row: [] for row in rows}
    for seed in seeds:
        gone = removals(setup, seed, count)
        truth = _truth(setup, seed, gone, cache, say)
        for row, scores in _scores(setup, seed, gone, rows, rank, say):
            each = [spearman(x, y) for x, y in zip(scores.T, truth.T, strict=True)]
            found[row].append(sum(each) / len(each))
    return {
        "study": "checkpoints",
        "mode": setup.mode,
        "steps": setup.steps,
        "rank": rank,
        "removals": count,
        "seeds": list(seeds),
        "rows": [{**row._asdict(), "mean": sum(x) / len(x), "each": x} for row, x in found.items()],
    }


def _rows(setup: GptSetup, numbers: Sequence[int | None]) -> Iterator[Row]:
    yield Row(None, RECORDED, True)
    for number in numbers:
        n = setup.steps if number is None else min(number, setup.steps)
        yield from (Row(n, "after", True), Row(n, "before", True), Row(n, "after", False))


def _truth(setup: GptSetup, seed: int, gone: Sequence[Removal], cache: Path | None, say: Say) -> Tensor:
    queries = draw(setup, seed).queries
    return leave_out(
        lambda: recipe(setup, seed), gone, lambda model: domain_losses(model, queries),
        lambda done, total: say(f"seed {seed}: retrain", done, total), cache=cache, dtype=torch.float64,
    )  # fmt: skip


def _scores(
    setup: GptSetup, seed: int, gone: Sequence[Removal], rows: Sequence[Row], rank: int, say: Say
) -> Iterator[tuple[Row, Tensor]]:
    """Predicted changes (removals, domains) of each row."""
    chosen: dict[str, Any] = {"rank": rank, "seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        plan, kept = _trained(setup, seed, Path(folder) / RECORDED, chosen)
        for i, row in enumerate(rows):
            path = Path(folder) / f"{i}"
            say(f"seed {seed}: runs", i, len(rows))
            if row.checkpoints is None:
                run = Run(Path(folder) / RECORDED)
            else:
                given = _some(kept, row.checkpoints, row.moments)
                run = record_checkpoints(recipe(setup, seed), given, path, nearest=row.nearest, **chosen)
            answer = run.query(plan.model, domain_losses, plan.queries["domains"])
            yield row, torch.stack([answer.sum_over(removal.samples) for removal in gone])
        say(f"seed {seed}: runs", len(rows), len(rows))


def _trained(setup: GptSetup, seed: int, path: Path, chosen: dict[str, Any]) -> tuple[Recipe, list[Given]]:
    """The trained and recorded run, and its state before the first and after every step."""
    plan = recipe(setup, seed)
    kept = [_snapshot(0, plan)]
    with record(plan.model, plan.optimizer, path, loss_reduction=plan.loss_reduction, **chosen) as rec:
        for t, (ids, tokens) in enumerate(plan.batches):
            with rec.step(ids, tokens=counts(tokens)):
                take_step(plan, t)
            kept.append(_snapshot(t + 1, plan))
    return plan, kept


def _snapshot(t: int, plan: Recipe) -> Given:
    return t, copy.deepcopy(plan.model.state_dict()), copy.deepcopy(plan.optimizer.state_dict())


def _some(kept: Sequence[Given], number: int, moments: bool) -> list[Given]:
    steps = len(kept) - 1
    chosen = sorted({0} | {max(1, round(steps * k / number)) for k in range(1, number + 1)})
    return [kept[t] if moments else (t, kept[t][1], None) for t in chosen]
