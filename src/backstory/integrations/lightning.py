"""Record Lightning's Trainer with one callback.

    trainer = Trainer(..., callbacks=[BackstoryCallback("runs/x", loss_reduction="mean")])

Lightning runs forward and backward in a closure inside `optimizer.step`; while recording, the closure is run first and the
update after it, as torch's optimizers do themselves, so that the gradients are there when the update is read. The loss of a
micro-batch is divided by `accumulate_grad_batches`, also where an epoch ends early, and weights follow that.
"""

from collections import deque
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..errors import UnsupportedError, UsageError
from ..maths.steps import loss_divisor
from .carry import Ids, queued
from .recording import RecordingCallback, Tokens

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise UnsupportedError(
        f"Lightning cannot be imported ({error}). Install it with: pip install '.[lightning]' in the checkout"
    ) from error


class BackstoryCallback(RecordingCallback, Callback):  # type: ignore[misc]
    """Records the training of a Lightning Trainer into the folder `path`.

    `loss_reduction` is how `training_step` combines the samples' losses: "mean", "sum" or "token-mean", which needs `tokens`, a
    function of the batch that counts the tokens with a loss in each sample. `ids` has one entry per item of the training data, or
    is the name of a key of its items; the default is the item's `sample_id`, else its index. All other arguments are those of
    `backstory.record`. If training resumes from a checkpoint, the recording continues in the same run.
    """

    def __init__(
        self, path: str | Path, *, loss_reduction: str, ids: Ids = None, tokens: Tokens | None = None, **arguments: Any
    ) -> None:
        super().__init__(path, loss_reduction, ids, tokens, arguments)
        if loss_reduction == "token-mean" and tokens is None:
            raise UsageError(
                "loss_reduction='token-mean' needs tokens=, a function of the batch that returns how many tokens of "
                "each sample have a loss, such as lambda batch: (batch['labels'][:, 1:] != -100).sum(1)."
            )
        self._names: deque[list[int | str]] = deque()  # of the batches that were fetched and not trained on yet
        self._start = 0  # where a checkpoint goes on
        self._updates = 0  # of the Trainer, when the step under way began

    @property
    def scope(self) -> Any:
        """The step under way: `training_step` may call its `outputs` (needed for sampled curvature) and `losses`."""
        return self._run.scope

    # -- training begins and ends ----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the loaders are made: let their batches leave ids behind."""
        _refuse(trainer, pl_module)
        source = trainer.fit_loop._data_source
        source.dataloader = lambda: self._wrapped(type(source).dataloader(source))
        self._undo.append(lambda: source.__dict__.pop("dataloader", None))

    def _wrapped(self, loader: Any) -> DataLoader[Any]:
        if not isinstance(loader, DataLoader):
            raise UnsupportedError(
                f"training batches must come from a single torch DataLoader, got {type(loader).__name__}. Join the "
                "datasets (torch.utils.data.ConcatDataset), or write the loop yourself with backstory.record."
            )
        return queued(loader, self._ids, self._names)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Everything is set up, and a checkpoint has been loaded: open the run."""
        optimizer = trainer.optimizers[0]
        start = self._start or int(trainer.global_step)
        planned = trainer.estimated_stepping_batches
        steps = int(planned) if planned != float("inf") else None
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._run.open(pl_module, optimizer, start=start, steps=steps, scaler=scaler)
        self._undo.append(_closure_first(optimizer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Training is over."""
        self._finish()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Training has raised; the run can be resumed from a checkpoint."""
        self._finish(failed=True)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Whatever happened, the hooks go."""
        self._finish(failed=True)

    def _finish(self, *, failed: bool = False) -> None:
        self._start = 0
        super()._finish(failed=failed)

    # -- one step --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Declare a micro-batch; the first of an update begins its step."""
        if self._run.scope is None:
            self._run.begin()
            self._updates = int(trainer.global_step)
        names = self._names.popleft()
        tokens = None if self._run.tokens is None else self._run.tokens(batch)
        by = trainer.accumulate_grad_batches * int(loss_divisor(self._run.reduction, len(names), tokens))
        self._run.batch(names, 1.0 / by)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The last micro-batch of an update ends its step."""
        if int(trainer.global_step) > self._updates:
            self._run.end()

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Before a checkpoint is written: the run holds all steps that it continues from."""
        self._run.flush()

    def state_dict(self) -> dict[str, Any]:
        """Where a checkpoint made now would go on."""
        return {"step": self._run.at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint was made."""
        self._start = int(state_dict["step"])


def _closure_first(optimizer: Optimizer) -> Callable[[], Any]:
    """Let `optimizer.step(closure)` run its closure, and only then step; returns what undoes it."""
    plain = optimizer.step
    shadowed = "step" in optimizer.__dict__  # a learning-rate scheduler counts steps there

    @wraps(plain)
    def step(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        if closure is None:
            return plain(**kwargs)
        with torch.enable_grad():
            loss = closure()
        plain(**kwargs)
        return loss

    optimizer.step = step  # type: ignore[method-assign]
    return partial(setattr, optimizer, "step", plain) if shadowed else partial(optimizer.__dict__.pop, "step", None)


def _refuse(trainer: Any, module: Any) -> None:
    if trainer.world_size > 1:
        raise UnsupportedError(
            f"training runs on {trainer.world_size} processes, and each sees only some of the samples. Pass "
            "devices=1, and use accumulate_grad_batches= for a large batch."
        )
    if not module.automatic_optimization:
        raise UnsupportedError(
            "automatic_optimization=False is not supported. Let Lightning call the optimizer, or write the loop "
            "yourself with backstory.record."
        )
