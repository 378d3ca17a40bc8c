"""`backstory.record`: what the user chose, checked, and the recorder that follows from it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..capture import OptimizerReader, find_blocks
from ..capture.modules import Selection
from ..errors import UsageError
from .adam import Adaptive
from .recorder import Recorder
from .resume import open_store
from .settings import RecordSettings, curvature_of


def record(
    model: nn.Module,
    optimizer: Optimizer,
    path: str | Path,
    *,
    loss_reduction: str,
    projection: str = "learned",
    rank: int | tuple[int, int] | Mapping[str, int | tuple[int, int]] | str = 16,
    curvature: str = "auto",
    layers: Selection | None = None,
    uncovered: str = "error",
    encoding: str = "float16",
    factored: bool = False,
    seed: int = 0,
    optimizer_model: str = "auto",
    steps: int | None = None,
    checkpoints: int | None = None,
    max_bytes: int | None = None,
    warmup_steps: int = 20,
    warmup_bytes: int = 2 << 30,
    resume: bool = False,
    start: int | None = None,
    scaler: Any = None,
    clip_norm: float | str | None = None,
    recipe: str | None = None,
    recipe_args: Mapping[str, Any] | None = None,
) -> Recorder:
    """Record the training of `model` by `optimizer` into the folder `path`.

    `loss_reduction` says how the losses of samples make the loss that is differentiated: "mean", "sum",
    "token-mean" (a sum over all tokens divided by their number in the step) or "weights" (given per batch).
    `projection` is "learned", "random", "mask" or "full"; `rank` a number, a pair (out, in), a dict from name
    patterns to either, or "auto:S": as many numbers as hold the share S of the gradients' energy in the warm-up, at most
    as many as rank 32 ("auto:S/R": rank R) would keep. `curvature` is "empirical" (free), "sampled:D" (D more backward passes, needs `s.outputs`) or
    "exact:N" (N passes, one for each class); "/K" behind it takes each sequence's rows apart by K groups of positions
    ("empirical/6": free, and "auto" for token-mean losses; "auto" is "empirical" otherwise). `layers` includes names and types, and excludes names that begin with "!"; the name of a module means everything below it.
    With `factored`, rows in other than learned coordinates are kept as two factors for each matrix, which is exact and far smaller for
    samples that pass each layer once, at one position (a fully connected net; not sequences or images in convolutions); others are refused.
    `steps` is the planned number of steps: it lets recording refuse a plan that exceeds the disk or `max_bytes`
    before the first byte, and is needed for `checkpoints=K`. To go on after an interruption, pass `resume=True`
    and `start=t`, the step that your own checkpoint continues from; what lay beyond t is replaced.
    """
    settings = RecordSettings(
        loss_reduction=loss_reduction,
        projection=projection,
        rank=rank,
        curvature=curvature_of(curvature, loss_reduction),
        encoding=encoding,
        factored=factored,
        seed=seed,
        optimizer_model=optimizer_model,
        uncovered=uncovered,
        warmup_steps=warmup_steps,
        warmup_bytes=warmup_bytes,
    )
    if checkpoints is not None and not steps:
        raise UsageError("checkpoints=K needs steps=, the planned number of steps, to place its K boundaries.")
    if recipe is not None and recipe.count(":") != 1:
        raise UsageError(f"found recipe={recipe!r}; expected an import path 'package.module:function'.")
    blocks = find_blocks(model, optimizer, rank=settings.widths(), layers=layers, uncovered=uncovered)
    reader = OptimizerReader(model, optimizer, model_as=optimizer_model, scaler=scaler, clip_norm=clip_norm)
    adaptive = Adaptive(reader, blocks.blocks, projection)
    extra = {"recipe": recipe, "recipe_args": dict(recipe_args or {})}
    store = open_store(Path(path), model, blocks, optimizer, adaptive, settings, extra, resume=resume, start=start)
    plan = {"steps": steps, "checkpoints": checkpoints, "max_bytes": max_bytes}
    return Recorder(model, blocks, reader, adaptive, store, settings, **plan)
