"""Record Lightning's Trainer with one callback.

    trainer = Trainer(..., callbacks=[BackstoryCallback("runs/x", loss_reduction="mean")])

Lightning runs forward and backward in a closure inside `optimizer.step`; while recording, the closure is run first and the
update after it, as torch's optimizers do themselves, so that the gradients are there when the update is read. The loss of a
micro-batch is divided by `accumulate_grad_batches`, also where an epoch ends early, and weights follow that.
"""

import inspect
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from ..errors import UnsupportedError, UsageError
from ..maths.steps import loss_divisor
from . import written
from .carry import Ids, queued
from .recording import RecordingCallback, Tokens
from .writing import BATCH_BYTES, NotWritable, as_json, check_rebuilt, class_path, describe

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.utilities.seed import isolate_rng
except ImportError as error:
    raise UnsupportedError(
        f"Lightning cannot be imported ({error}). Install it with: pip install '.[lightning]' in the checkout"
    ) from error


CLOSE = 1e-3  # how far a loss may be from the sum of its samples' losses; ten times as far in mixed precision
WRITE = "write the method sample_losses(self, batch), which returns each sample's loss (B,), in the module"


class BackstoryCallback(RecordingCallback, Callback):  # type: ignore[misc]
    """Records the training of a Lightning Trainer into the folder `path`.

    `loss_reduction` is how `training_step` combines the samples' losses: "mean", "sum" or "token-mean", which needs `tokens`, a
    function of the batch that counts the tokens with a loss in each sample. `ids` has one entry per item of the training data, or
    is the name of a key of its items; the default is the item's `sample_id`, else its index. All other arguments are those of
    `backstory.record`. If training resumes from a checkpoint, the recording continues in the same run.

    A recipe is written into the run (class and configuration of the model, start weights, the batches), so that commands and exact
    results work in another process; what cannot be written is reported when training begins. `recipe=False` writes none, a name
    `"package.module:function"` is that of your own. `batch_bytes` limits the room for batches. `queries` are query sets to
    store: name -> a batch of tensors, or a data set.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        loss_reduction: str,
        ids: Ids = None,
        tokens: Tokens | None = None,
        recipe: str | bool = True,
        batch_bytes: int = BATCH_BYTES,
        queries: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(path, loss_reduction, ids, tokens, arguments, recipe, batch_bytes, queries)
        if loss_reduction == "token-mean" and tokens is None:
            raise UsageError(
                "loss_reduction='token-mean' needs tokens=, a function of the batch that returns how many tokens of "
                "each sample have a loss, such as lambda batch: (batch['labels'][:, 1:] != -100).sum(1)."
            )
        self._names: deque[list[int | str]] = deque()  # of the batches that were fetched and not trained on yet
        self._start = 0  # where a checkpoint goes on
        self._updates = 0  # of the Trainer, when the step under way began
        self._rebuilt: Any = None  # the module as the recipe builds it, until its first loss is compared
        self._loss: float | None = None  # of the first micro-batch, as the recipe takes it

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
        self._collate = loader.collate_fn
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
        assert self._run.recorder is not None
        with isolate_rng():
            self._recipe.begin(
                self._run.recorder, lambda: self._described(trainer, pl_module, optimizer), self._collate, steps
            )

    def _described(self, trainer: Any, module: Any, optimizer: Optimizer) -> dict[str, Any]:
        """What recipe.json says of this training; the module is built as it says, to see whether that can be done."""
        made = {"class": class_path(type(module), "the module's class"), "arguments": _arguments(module)}
        own = callable(getattr(module, "sample_losses", None))
        if not own and self._run.reduction == "token-mean":
            raise NotWritable(
                "training_step returns a mean over tokens, from which the samples' losses do not follow: "
                f"{WRITE} (with token-mean, the sum over its tokens)"
            )
        about = describe(module, optimizer, made, {"kind": "sample_losses" if own else "training_step"})
        about["eval"] = [name for name, part in module.named_modules() if not part.training]
        about["clip_norm"] = None if not trainer.gradient_clip_val else float(trainer.gradient_clip_val)
        about["no_replay"] = about["no_replay"] or _obstacle(trainer, module)
        try:
            self._rebuilt = written.build_model(about)
        except Exception as error:
            raise NotWritable(f"{type(module).__name__} cannot be built again ({error})") from error
        check_rebuilt(module, self._rebuilt, "its class")
        return about

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
        self._start, self._rebuilt, self._loss = 0, None, None
        super()._finish(failed=failed)

    # -- one step --------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Declare a micro-batch; the first of an update begins its step."""
        if self._run.scope is None:
            self._begin_step()
            self._updates = int(trainer.global_step)
        names = self._names.popleft()
        tokens = None if self._run.tokens is None else self._run.tokens(batch)
        by = trainer.accumulate_grad_batches * int(loss_divisor(self._run.reduction, len(names), tokens))
        self._run.batch(names, 1.0 / by)
        self._recipe.add(batch)
        if self._rebuilt is not None and self._recipe.first:
            self._try_loss(pl_module, self._recipe.last() if self._recipe.replays else batch, len(names), 1.0 / by)
        self._rebuilt = None

    def _try_loss(self, module: Any, batch: Any, samples: int, weight: float) -> None:
        """The loss of the first micro-batch as the recipe takes it, before the training does; the module is not touched."""
        about, rebuilt = self._recipe.about, self._rebuilt
        try:
            rebuilt.load_state_dict(module.state_dict())
            rebuilt.to(next(module.parameters()).device)
            with isolate_rng(), torch.no_grad():
                losses = written.loss_of(about["loss"])(rebuilt, batch)
            if losses.shape != (samples,):
                raise UsageError(f"the batch has {samples} samples, but {len(losses)} losses")
            self._loss = weight * float(losses.double().sum())
        except Exception as error:
            self._recipe.refuse(f"the losses of single samples could not be taken ({error}): {WRITE}")

    def _compare_loss(self, outputs: Any) -> None:
        """The loss that was differentiated must be the one that the recipe takes."""
        expected, self._loss = self._loss, None
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if expected is None or not isinstance(loss, Tensor) or not self._recipe.first:
            return
        allowed = CLOSE if self._recipe.replays else 10 * CLOSE
        if abs(float(loss.detach()) - expected) > allowed * abs(expected) + 1e-9:
            self._recipe.refuse(
                f"the losses of single samples add up to {expected:.6g}, but training_step returned "
                f"{float(loss.detach()):.6g} (dropout, BatchNorm, a loss across samples, or another loss_reduction): {WRITE}"
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The last micro-batch of an update ends its step."""
        self._compare_loss(outputs)
        if int(trainer.global_step) > self._updates:
            self._end_step()

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


def _arguments(module: Any) -> dict[str, Any]:
    """The arguments of the module's class, as `save_hyperparameters` stored them."""
    parameters = inspect.signature(type(module).__init__).parameters.values()
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self"]
    if missing := [name for name in named if name not in module.hparams]:
        raise NotWritable(
            f"the module's argument {missing[0]!r} is not known: call self.save_hyperparameters() in __init__ of "
            f"{type(module).__name__}"
        )
    chosen = {name: module.hparams[name] for name in named}
    return {name: as_json(value, f"the module's argument {name!r}") for name, value in chosen.items()}


def _obstacle(trainer: Any, module: Any) -> str | None:
    """Why the training cannot be replayed, if so."""
    if trainer.precision not in ("32-true", "64-true"):
        return f"precision={trainer.precision!r} is not replayed"
    if trainer.gradient_clip_val and trainer.gradient_clip_algorithm not in (None, "norm"):
        return f"gradient_clip_algorithm={str(trainer.gradient_clip_algorithm)!r} is not replayed"
    own = type(module).configure_gradient_clipping is not LightningModule.configure_gradient_clipping
    return "the module clips gradients by itself (configure_gradient_clipping)" if own else None


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
