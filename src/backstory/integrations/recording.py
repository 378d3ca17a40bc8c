"""A recording whose steps begin and end in different callbacks of a trainer.

Trainers weigh samples in ways of their own (by the tokens of a step, by micro-batch, by a number of micro-batches that an
epoch's end may cut short), so that each micro-batch comes with its weights: the run's loss_reduction is "weights".
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import UsageError, check_one_of
from ..recording.recorder import Recorder, record
from ..recording.settings import NAMES, settings_of
from ..recording.step import StepScope
from .carry import Ids
from .writing import RecipeWriter

FILLED_IN = ("resume", "start", "scaler")  # by the trainer
Tokens = Callable[[Any], Tensor]  # batch -> how many tokens of each sample have a loss (B,)


class Recording:
    """What the user chose, and the recorder while training goes on."""

    def __init__(
        self, path: str | Path, loss_reduction: str, tokens: Tokens | None, arguments: Mapping[str, Any]
    ) -> None:
        check_one_of("loss_reduction", loss_reduction, ("mean", "sum", "token-mean"))
        if taken := [name for name in FILLED_IN if name in arguments]:
            raise UsageError(f"{taken[0]}= is set by the trainer. Leave it out.")
        self.path, self.reduction, self.tokens = Path(path), loss_reduction, tokens
        others = dict(arguments)
        short = {name: others.pop(name) for name in NAMES if name in others}
        others["settings"] = settings_of(others.get("settings"), short, others.pop("preset", None)).resolved(
            loss_reduction
        )
        self._arguments = {**others, "loss_reduction": "weights"}
        self.recorder: Recorder | None = None
        self.scope: StepScope | None = None  # of the step under way
        self._step: AbstractContextManager[StepScope] | None = None
        self._start = self._ended = 0

    @property
    def at(self) -> int:
        """How many steps the run holds now."""
        return self._start + self._ended - (self.recorder.skipped if self.recorder is not None else 0)

    def open(self, model: nn.Module, optimizer: Optimizer, *, start: int, steps: int | None, scaler: Any) -> None:
        """Begin a new run, or go on in the old one from step `start`."""
        self.close(failed=True)
        if start and not (self.path / "config.json").exists():
            raise UsageError(
                f"training resumes at step {start}, but {self.path} has no run, so the earlier steps would be "
                "missing. Record from the first step, or start a new training run from these weights without "
                "resuming from a checkpoint."
            )
        arguments = {"steps": steps, **self._arguments, "scaler": scaler, "resume": bool(start), "start": start or None}
        recorder = record(model, optimizer, self.path, **arguments)
        self.recorder, self._start, self._ended = recorder.__enter__(), start, 0

    def begin(self) -> None:
        """One optimizer update begins."""
        if self.recorder is not None and self._step is None:
            self._step = self.recorder.step()
            self.scope = self._step.__enter__()

    def batch(self, ids: Sequence[int | str], weight: float = 1.0, groups: Sequence[int] | None = None) -> StepScope:
        """Declare a micro-batch whose samples all have this weight; `groups` where they have several rows."""
        assert self.scope is not None
        n, sums = len(ids), self.reduction == "token-mean"  # then ℓ is a sum over tokens: one loss term
        weights = torch.full((n,), weight, dtype=torch.float64)
        self.scope.batch(ids, weights=weights, tokens=[1] * n if sums else None, groups=groups)
        return self.scope

    def weigh(self, slot: int, weight: float) -> None:
        """Change the weight of a micro-batch's samples, where it is known only after the forward pass."""
        assert self.scope is not None
        self.scope.weigh(slot, [weight] * self.scope.sizes[slot])

    def end(self) -> None:
        """The update has been made, or skipped by a GradScaler."""
        if self._step is not None:
            step, self._step, self.scope = self._step, None, None
            step.__exit__(None, None, None)
            self._ended += 1

    def abandon(self) -> None:
        """Forget the step under way."""
        if self._step is not None:
            step, self._step, self.scope = self._step, None, None
            reason = UsageError("the trainer stopped in the middle of a step")
            step.__exit__(UsageError, reason, None)

    def flush(self) -> None:
        """Everything so far is on disk, as it must be before the trainer keeps a checkpoint."""
        if self.recorder is not None:
            self.recorder.flush()

    def close(self, *, failed: bool = False) -> None:
        """End the recording; after a failure it can be resumed from the trainer's last checkpoint."""
        recorder, self.recorder = self.recorder, None
        if recorder is None:
            return
        try:
            self.abandon()
        finally:
            error = UsageError("training was interrupted") if failed else None
            recorder.__exit__(None if error is None else type(error), error, None)


class RecordingCallback:
    """What the callbacks of all trainers share."""

    def __init__(
        self,
        path: str | Path,
        loss_reduction: str,
        ids: Ids,
        tokens: Tokens | None,
        arguments: Mapping[str, Any],
        recipe: str | bool,
        batch_bytes: int,
        queries: Mapping[str, Any] | None,
    ) -> None:
        named = {"recipe": recipe} if isinstance(recipe, str) else {}
        self._run = Recording(path, loss_reduction, tokens, {**arguments, **named})
        self._recipe = RecipeWriter(recipe is True, batch_bytes, queries)
        self._ids = ids
        self._undo: list[Callable[[], Any]] = []  # what ends with the recording

    @property
    def recorder(self) -> Recorder | None:
        """The `backstory.Recorder` while training goes on, for example to `describe` samples."""
        return self._run.recorder

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # a copy of the model made while recording keeps its hooks

    def _begin_step(self) -> None:
        """An update begins."""
        self._run.begin()
        self._recipe.begin_step()

    def _end_step(self) -> None:
        """The update has been made."""
        if self._run.scope is not None:
            self._recipe.end_step(self._run.scope.number)
        before = self._run.at
        self._run.end()
        if self._run.at > before:  # no GradScaler skipped it
            self._recipe.settle()

    def _finish(self, *, failed: bool = False) -> None:
        while self._undo:
            self._undo.pop()()
        self._recipe.end()
        self._run.close(failed=failed)
