"""Calibrated quality beside the rank correlation with retraining, for each run.

A run is recorded and calibrated on the mean of its queries (`run.calibrate`: exact sweeps, and a few single uses left out). Then single uses, drawn with another seed,
are left out, as many from each third of the run, one training each in the run's own precision, and the recorded influences on the
mean of the queries are ranked beside what that did. The quality is right where it lies in the bootstrap interval of that correlation.

Shapes:  R uses that are left out.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backstory.exact.leave_out import retrain
from backstory.exact.losses import QuerySet
from backstory.insight.mean import mean_influence
from backstory.replay.recipe import Recipe
from backstory.results.quality import THIRDS, Quality, part_of
from backstory.run.calibrate import draw_removals
from experiments.harness import Say, recorded, silent
from experiments.quality.runs import KINDS, QUERIES, Kind
from experiments.statistics import interval, spearman

WELL = 0.6  # a run that ranks retraining below this must not be said to rank well
OTHERS = 1000  # added to the seed: uses are not drawn as calibration draws them; a few may be the same
TWINS = 3


def study(
    names: Sequence[str], seed: int, *, removals: int = 180, calibrated: int = 24, say: Say = silent
) -> dict[str, Any]:
    """A row for each run, as plain values, and how many qualities were right."""
    rows = [judge(name, KINDS[name], seed, removals, calibrated, say) for name in names]
    return {
        "seed": seed,
        "removals": removals,
        "rows": rows,
        "right": sum(row["right"] for row in rows),
        "flattered": sum(row["flattered"] for row in rows),
    }


def judge(name: str, kind: Kind, seed: int, removals: int, calibrated: int, say: Say) -> dict[str, Any]:
    """One run."""

    def make() -> Recipe:
        return kind.make(seed)

    with tempfile.TemporaryDirectory() as folder:
        began, plan = time.process_time(), make()
        say(f"{name}: record", 0, 1)
        run = recorded(plan, Path(folder) / "run", **kind.settings)
        influence = mean_influence(run, plan.model, plan.loss, plan.queries[QUERIES])
        quality = run.calibrate(
            QUERIES, make, removals=calibrated, progress=lambda done, total: say(f"{name}: calibrate", done, total)
        )
        measured = time.process_time()
        left_out = draw_removals(influence, removals, seed + OTHERS)
        truth, twins = retrain(
            make, left_out, QuerySet(QUERIES, mean=True), lambda done, total: say(f"{name}: retrain", done, total), twins=TWINS, run=run._store,
        )  # fmt: skip
        predicted = torch.stack([influence.sum_over(r.samples, steps=r.steps) for r in left_out])
    third = part_of([r.steps[0] for r in left_out if r.steps], influence.at, THIRDS)
    row = compare(quality, predicted[:, 0], truth[:, 0], torch.from_numpy(third))
    floor = float(twins.abs().max())
    seconds = {"calibrate": measured - began, "retrain": time.process_time() - measured}
    return {"run": name, **row, "clear": float((truth[:, 0].abs() > floor).double().mean()), "seconds": seconds}


def compare(quality: Quality, predicted: Tensor, truth: Tensor, third: Tensor) -> dict[str, Any]:
    """The quality beside the correlation of predictions (R,) with retraining (R,), whole and by thirds."""
    lower, upper = interval([(predicted, truth)])
    rank = spearman(predicted, truth)
    measured = quality.rank
    whole = replace(quality, thirds=()).sentence.split(";")[0]
    thirds = [spearman(predicted[third == k], truth[third == k]) for k in range(THIRDS)]
    return {
        "quality": measured,
        "recorded_with_exact": None if quality.whole is None else quality.whole.rank,
        "exact_with_retraining": None if quality.first_order is None else quality.first_order.rank,
        "retraining": {"rank": rank, "lower": lower, "upper": upper},
        "thirds": {"quality": list(quality.by_third), "retraining": thirds},
        "sentence": quality.sentence,
        "right": measured is not None and lower <= measured <= upper,
        "flattered": rank < WELL and " well " in whole,
    }
