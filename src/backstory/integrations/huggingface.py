"""Record a `transformers.Trainer` with one callback.

    trainer = Trainer(..., callbacks=[BackstoryCallback("runs/x", loss_reduction="token-mean")])

Ids travel inside the batches and are taken out by a hook on the model, before it is called. The weights of samples are measured,
not assumed: the model's loss is compared with the sum of its samples' losses, which tells whether it was divided by
`num_items_in_batch`, the tokens of the whole step, or by those of the micro-batch; and a hook on the loss sees by what the Trainer
multiplied it (accumulation, the loss scale of a GradScaler).
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ..capture.ids import ID_KEY
from ..errors import UnsupportedError, UsageError
from ..maths.steps import loss_divisor
from ..store import RunStore
from . import written
from .carry import Ids, carry, decoded
from .losses import IGNORED, Part, Scored, counts, field, fitting, scored, shifts, targets, weight
from .recording import RecordingCallback, Tokens
from .writing import BATCH_BYTES, NotWritable, as_json, check_rebuilt, class_path, describe

try:
    from transformers import PreTrainedModel, TrainerCallback, __version__
except ImportError as error:
    raise UnsupportedError(
        f"transformers cannot be imported ({error}). Install it with: pip install '.[hf]' in the checkout"
    ) from error


class BackstoryCallback(RecordingCallback, TrainerCallback):
    """Records the training of a `transformers.Trainer` into the folder `path`.

    `loss_reduction` is "token-mean" for language models, "mean" for one label per sample, or "sum". `ids` has one entry per item
    of the training data, or is the name of a column; the default is the item's `sample_id`, else its index. `tokens` is needed
    for models that are not from transformers: a function of the model's inputs that counts the tokens with a loss in each
    sample. All other arguments are those of `backstory.record`. If training resumes from a checkpoint, the recording continues in the same run.

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
        _check_version(__version__)
        super().__init__(path, loss_reduction, ids, tokens, arguments, recipe, batch_bytes, queries)
        self._shifted: bool | None = None
        self._scaler: Any = None
        self._scale = 1.0  # by which it multiplies the loss of this step
        self._parts: list[Part] = []  # micro-batches of the step under way

    def close(self) -> None:
        """Release the run and the model after training raised an error; the run can be resumed from a checkpoint."""
        self._finish(failed=True)

    # -- training begins and ends ----------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training begins, or goes on from a checkpoint: open the run, and let ids travel."""
        self._finish(failed=True)
        _refuse(args)
        model, optimizer, loader = kwargs["model"], kwargs["optimizer"], kwargs["train_dataloader"]
        self._shifted = shifts(model)
        self._scaler = getattr(optimizer, "scaler", None)
        inner = getattr(loader, "base_dataloader", loader)  # accelerate wraps it
        if not isinstance(inner, DataLoader):
            raise UnsupportedError(
                f"training batches must come from torch's DataLoader, got {type(loader).__name__}. Return a "
                "DataLoader from get_train_dataloader, or write the loop yourself with backstory.record."
            )
        collate = _query_collator(model, inner.collate_fn)
        self._undo.append(carry(inner, self._ids))
        start, steps, plain = self._start(state.global_step), state.max_steps or None, _plain(optimizer)
        try:
            self._run.open(model, plain, start=start, steps=steps, scaler=self._scaler)
            assert self._run.recorder is not None
            self._recipe.begin(
                self._run.recorder, lambda: _described(model, plain, args, self._shifted), collate, steps
            )
        except BaseException:
            self._finish(failed=True)
            raise
        self._attach(model)

    def _start(self, step: int) -> int:
        """The run's step where the Trainer's is `step`: it counts steps that a GradScaler skipped."""
        if not step or not (self._run.path / "config.json").exists():
            return step
        return int(RunStore.open(self._run.path).config.get("trainer_steps", {}).get(str(step), step))

    def _attach(self, model: nn.Module) -> None:
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        self._undo.append(model.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        self._undo.append(model.register_forward_hook(after, with_kwargs=True).remove)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The last report comes before the best model is loaded: the model is still the one that training ended with."""
        if "train_runtime" in (logs or {}):
            self._finish()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is over."""
        self._finish()

    # -- one step --------------------------------------------------------------------------------------------------

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update begins."""
        self._parts = []
        self._scale = float(self._scaler.get_scale()) if self._scaler is not None else 1.0
        self._begin_step()

    def _before(self, model: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Take the ids out of the inputs, and declare the micro-batch."""
        names = inputs.pop(ID_KEY, None)
        if names is None:
            return None
        if self._run.scope is not None and torch.is_grad_enabled():
            ids = decoded(names)
            pairs = self._run.reduction == "mean" and _rows(inputs) == 2 * len(ids)
            if not pairs:
                _refuse_packing(inputs, len(ids))
            items = inputs.get("num_items_in_batch")
            divisor = len(ids) if pairs else self._micro_batch_divisor(inputs, len(ids))
            self._parts.append(Part(None if items is None else int(items), divisor))
            self._run.batch(ids, groups=list(range(len(ids))) * 2 if pairs else None)
            if args and self._recipe.replays:
                self._recipe.refuse_replay("the model's inputs must be passed by name")
            self._recipe.add({name: value for name, value in inputs.items() if name != "num_items_in_batch"})
        return args, inputs

    def _micro_batch_divisor(self, inputs: dict[str, Any], samples: int) -> int | None:
        """What a mean over the micro-batch alone divides by; None where that cannot be counted."""
        labels = None if self._shifted is None else targets(inputs, self._shifted)
        if self._run.reduction != "token-mean":
            if labels is not None and labels.numel() > samples:
                raise UsageError(
                    f"loss_reduction must be 'token-mean' for labels with {labels.shape[1]} tokens per sample, "
                    f"because the model divides its loss by the number of tokens, got {self._run.reduction!r}."
                )
            return int(loss_divisor(self._run.reduction, samples))
        if self._run.tokens is not None:
            return int(self._run.tokens(inputs).sum())
        return None if labels is None else int(counts(labels).sum())

    def _after(self, model: nn.Module, args: Any, inputs: dict[str, Any], outputs: Any) -> None:
        """Read the logits and the loss of a declared micro-batch."""
        loss = field(outputs, "loss")
        if self._run.scope is None or not self._parts or not torch.is_grad_enabled():
            return
        slot, divisors = len(self._parts) - 1, self._parts[-1].divisors()
        labelled = None if self._shifted is None else scored(inputs, outputs, self._shifted)
        if labelled is not None:
            divisors = self._take(labelled, loss, divisors)
        elif self._recipe.active:
            self._recipe.refuse("the model's loss is not a cross-entropy of its logits and labels")
        if labelled is None and self._shifted:
            divisors = divisors[:1]  # no logits, as from fused losses: language models divide by what they are given
        if isinstance(loss, Tensor) and loss.requires_grad:
            loss.register_hook(lambda factor: self._weigh(slot, float(factor.sum()), divisors))

    def _take(self, labelled: Scored, loss: Any, divisors: list[int]) -> list[int]:
        """Keep each sample's loss, and hand the logits on for curvature; returns the divisors that fit the model's loss."""
        scope, losses = self._run.scope, labelled.losses()
        assert scope is not None
        if isinstance(loss, Tensor):
            divisors = fitting(float(loss.detach()), float(losses.sum()), divisors)
        scope.losses(losses)
        if scope.curvature is not None:
            mask = labelled.labels != IGNORED if labelled.labels.dim() == 2 else None
            scope.outputs(labelled.logits, "cross-entropy", mask=mask, reduction=None if mask is None else "sum")
        return divisors

    def _weigh(self, slot: int, factor: float, divisors: list[int]) -> None:
        """The Trainer multiplied a micro-batch's loss by `factor` before differentiating it."""
        if len(set(divisors)) != 1:
            raise UnsupportedError(
                "Backstory cannot tell whether the model divides its loss by num_items_in_batch (possible divisors: "
                f"{divisors}). If the model ignores it, set model.accepts_loss_kwargs = False before creating the "
                "Trainer. For a custom token loss, pass tokens= to BackstoryCallback, a function of the model's inputs."
            )
        self._parts[slot].weighed = True
        self._run.weigh(slot, weight(factor / self._scale, divisors[0]))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All micro-batches are there: are their weights known?"""
        if self._run.scope is None:
            return
        if not self._parts:
            raise UsageError(
                f"no ids reached the model in step {state.global_step}. A custom compute_loss must pass on all its "
                f"inputs: model(**inputs), or model(..., {ID_KEY}=inputs[{ID_KEY!r}])."
            )
        if all(part.weighed for part in self._parts):
            return
        if len(self._parts) > 1 or not self._parts[0].divisors():
            raise UnsupportedError(
                "the Trainer differentiates another loss than the one the model returned (compute_loss_func, label "
                "smoothing or a custom compute_loss), so its micro-batches' weights are unknown. Let the model compute "
                "the loss, use gradient_accumulation_steps=1, or write the loop yourself with backstory.record."
            )
        if self._recipe.active:
            self._recipe.refuse(
                "the Trainer differentiates another loss than the one that the model returns (compute_loss, "
                "compute_loss_func or label smoothing)"
            )
        self._run.weigh(0, 1.0 / self._parts[0].divisors()[-1])  # a loss of one's own is what loss_reduction says

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The update has been made."""
        self._end_step()
        if control.should_save:
            self._keep(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A pass over the data ends; a checkpoint may follow."""
        self._run.abandon()
        self._keep(state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint of the best model may follow."""
        self._keep(state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was saved, perhaps at the wish of a later callback."""
        self._keep(state)

    def _keep(self, state: Any) -> None:
        """Before a checkpoint is saved: the run holds all its steps, and knows which they are."""
        recorder = self._run.recorder
        if recorder is None:
            return
        self._run.flush()
        known, step = recorder.store.config.get("trainer_steps", {}), str(state.global_step)
        if known.get(step, state.global_step) != self._run.at:
            recorder.store.update_config(trainer_steps={**known, step: self._run.at})


def _described(model: nn.Module, optimizer: Any, args: Any, shifted: bool | None) -> dict[str, Any]:
    """What recipe.json says of this training."""
    if shifted is None:
        raise NotWritable("the model's loss is not one of transformers' cross-entropies")
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "peft_config") else adapted
    needs_labels = bool(getattr(base.config, "is_encoder_decoder", False))
    loss = {"kind": "cross-entropy", "shifted": shifted, "labels": needs_labels}
    about = describe(model, optimizer, _made(adapted, base), loss)
    with torch.device("meta"):
        check_rebuilt(model, written.build_model(about), "its configuration")
    obstacles = {
        "mixed precision (fp16, bf16) is not replayed": args.fp16 or args.bf16,
        "noise on embeddings (neftune_noise_alpha) is not replayed": args.neftune_noise_alpha,
    }
    reasons = [reason for reason, there in obstacles.items() if there]
    about["clip_norm"] = float(args.max_grad_norm) if args.max_grad_norm and args.max_grad_norm > 0 else None
    about["no_replay"] = about["no_replay"] or next(iter(reasons), None)
    return about


def _made(model: Any, base: Any) -> dict[str, Any]:
    """How the model is built: its class and its configuration, and those of its adapter."""
    if not isinstance(base, PreTrainedModel):
        raise NotWritable(f"{type(base).__name__} is not a model of transformers, so how it is built is not known")
    values = as_json(json.loads(base.config.to_json_string(use_diff=False)), "the model's configuration")
    config = {"class": class_path(type(base.config), "the configuration"), "values": values}
    made = {
        "class": class_path(type(base), "the model's class"),
        "config": {**config, "attention": base.config._attn_implementation},
    }
    if model is base:
        return made
    if list(model.peft_config) != ["default"]:
        raise NotWritable(
            f"the model has the adapters {', '.join(model.peft_config)}, and only a single one, 'default', is written"
        )
    adapter = model.peft_config["default"]
    plain = {key: sorted(value) if isinstance(value, set) else value for key, value in adapter.to_dict().items()}
    chosen = {
        "class": class_path(type(adapter), "the adapter's class"),
        "values": as_json(plain, "the adapter's settings"),
    }
    return {**made, "adapter": chosen}


def _query_collator(model: nn.Module, collate: Callable[[Any], Any]) -> Callable[[Sequence[Any]], Any]:
    """The training's collator; columns that the model does not take are left out, as the Trainer does."""
    adapted: Any = model
    base = adapted.get_base_model() if hasattr(model, "peft_config") else adapted
    taken = {*inspect.signature(base.forward).parameters, "label", "label_ids", "labels"}

    def put_together(items: Sequence[Any]) -> Any:
        return collate([{k: v for k, v in x.items() if k in taken} if isinstance(x, Mapping) else x for x in items])

    return put_together


def _plain(optimizer: Any) -> Any:
    """torch's own optimizer, under accelerate's."""
    while not type(optimizer).__module__.startswith("torch.") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _check_version(version: str) -> None:
    if tuple(map(int, version.split(".")[:2])) < (5, 12):
        raise UnsupportedError(
            f"transformers must be 5.12 or newer, got {version}, whose Trainer handles gradient accumulation "
            "differently. Upgrade it, or write the loop yourself with backstory.record."
        )


def _refuse(args: Any) -> None:
    if args.world_size > 1 or args.n_gpu > 1:
        raise UnsupportedError(
            f"training runs on {max(args.world_size, args.n_gpu)} processes or devices, and each sees only some of "
            "the samples. Train in one process on one device (CUDA_VISIBLE_DEVICES=0), and use gradient accumulation "
            "for a large batch."
        )
    if args.auto_find_batch_size:
        raise UnsupportedError(
            "auto_find_batch_size restarts training in the middle of a recorded run. Set per_device_train_batch_size "
            "instead."
        )


def _rows(inputs: Mapping[str, Any]) -> int | None:
    """Of the inputs: twice as many as samples where TRL puts the rejected answers after the chosen ones."""
    given = inputs.get("input_ids")
    return len(given) if isinstance(given, Tensor) else None


def _refuse_packing(inputs: dict[str, Any], samples: int) -> None:
    for name in ("input_ids", "labels"):
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.dim() and len(value) != samples:
            raise UnsupportedError(
                f"the collator made {len(value)} rows of {name!r} from {samples} samples, so they cannot be told "
                "apart. Collate one row per sample (no packing, no padding-free batches), or pack before training, so "
                "that each packed row is a sample."
            )
