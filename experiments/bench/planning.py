"""What `backstory plan` says of a workload beforehand, beside what recording it then took."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from backstory.recording.plan import plan
from backstory.replay.recipe import Recipe
from experiments.bench.workloads import Workload, sample_losses


def recipe_of(work: Workload) -> Recipe:
    """The workload's training as a recipe."""
    model, optimizer = work.start()
    x, y = work.data()
    return Recipe(
        model=model,
        optimizer=optimizer,
        loss=lambda m, batch: sample_losses(m(batch[0]), batch[1]),
        batches=[(range(cut.start, cut.stop), (x[cut], y[cut])) for cut in work.visits(work.steps)],
        loss_reduction=work.loss_reduction,
        tokens=(lambda batch: _terms(batch, work.terms)) if work.language else None,
        clip_norm=1.0 if work.language else None,
    )


def _terms(batch: tuple[Tensor, Tensor], terms: int) -> Tensor:
    return batch[0].new_full((len(batch[0]),), terms)


def planned(work: Workload, result: Mapping[str, Any], seconds: float = 1.0) -> dict[str, Any]:
    """The plan of a run with the default settings, over the CPU time that it then took."""
    told = plan(lambda: recipe_of(work), steps=int(result["steps"]), seconds=seconds)
    each = told.row_bytes + told.step_bytes / told.batch + told.window_bytes / told.occurrences
    ratio = told.recorded_seconds / told.plain_seconds
    return {
        "workload": work.words,
        "planned_ratio": ratio,
        "ratio": result["mean_cpu_ratio"],
        "ratio_off": ratio / result["mean_cpu_ratio"] - 1,
        "planned_run_ratio": told.slowdown,
        "run_ratio": result["run_cpu_ratio"],
        "run_ratio_off": told.slowdown / result["run_cpu_ratio"] - 1,
        "planned_bytes": each,
        "bytes_per_occurrence": result["bytes_per_occurrence"],
        "bytes_off": each / result["bytes_per_occurrence"] - 1,
    }
