"""Recording: a context manager around the user's own training loop.

    with backstory.record(model, optimizer, "runs/digits", loss_reduction="mean") as rec:
        for ids, x, y in loader:
            with rec.step(ids):
                loss_fn(model(x), y).backward()
                optimizer.step()
            optimizer.zero_grad()

Hooks exist only inside the `with`. A step that raises, or that a GradScaler skips, is no step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import OptimizerReader, Tap, fingerprint
from ..capture.fingerprint import weights as weights_of
from ..capture.ids import as_text
from ..capture.modules import Block, Blocks
from ..capture.optimizer import Reading
from ..capture.precision import own_precision
from ..errors import NumericalError, UsageError
from ..maths.projection import Shape
from ..store import RunStore, Writer
from ..store.bases import load_bases, save_scales
from .adam import Adaptive
from .budget import Budget
from .checks import Passes, check_sums
from .contributions import divided
from .curvature import CurvatureRows
from .finishing import Behind, Done, exact_dots, meta_of, record_of
from .settings import RecordSettings
from .step import Ids, StepScope, safe_inverse
from .warmup import (
    Parts,
    fixed_bases,
    learn,
    project_spooled,
    project_step,
    save_bases,
    spool_step,
    spooled_bytes,
    warmup_of,
)

CHECK_EVERY = 100  # steps between two checks that the rows of all blocks add up to the gradient; else one in turn


class Recorder:
    """The context manager that `record` returns."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        reader: OptimizerReader,
        adaptive: Adaptive,
        store: RunStore,
        settings: RecordSettings,
        *,
        steps: int | None,
        checkpoints: int | None,
        max_bytes: int | None,
    ) -> None:
        self.model, self.store, self.settings = model, store, settings
        self.blocks: list[Block] = blocks.blocks
        self._device = self.blocks[0].parameter.device
        self._take_shapes([Shape(*b["shape"]) for b in store.config["blocks"]])
        self.skipped = 0  # steps that a GradScaler skipped
        self._form = settings.curvature_form()
        self._reader, self._adaptive = reader, adaptive
        self._tap = Tap(model, blocks, self._add, keep_calls=self._form.passes > 0, groups=self._form.groups)
        reader.on_step, reader.on_stepped = self._before_update, self._after_update
        self._boundaries = _boundaries(steps, checkpoints)
        self._bases = load_bases(store, (name for name, _ in self.layout)) or fixed_bases(
            settings.projection, self.layout, settings.seed
        )
        self._warmup = warmup_of(store) if "basis" in store.tensor_names() else 0  # steps behind the bases
        self._spooled_bytes = spooled_bytes(store)
        self._writer = Writer(store)
        self._behind = Behind(self._writer.put)
        self._scope: StepScope | None = None
        self._at = store.n_steps() or len(store.spooled())  # the next step's number
        self._began = self._at
        self._budget = Budget(store, self._at, steps, max_bytes)
        self._sound = True  # the model is where the last recorded step left it
        self._open = False
        self._projections: list[Any] | None = None

    # -- the context ---------------------------------------------------------------------------------------------

    def __enter__(self) -> "Recorder":
        if self._bases is not None and "basis" not in self.store.tensor_names():
            save_bases(self.store, self.layout, self._bases)
        if self._bases is None:
            self._end_warmup_if_enough()  # a death may have come between the last spooled step and the basis
        self._move_bases()
        if self._device.type == "cpu":
            _keep_freed_memory()
        self._tap.attach()
        self._reader.attach()
        self._open = True
        if self._at == 0:
            self._checkpoint(0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._tap.detach()
        self._reader.detach()
        self._open = False
        try:
            self._finish(failed=kind is not None)
        except BaseException:
            if error is None:
                raise  # else the user's own error matters more, and what was committed is safe

    @contextmanager
    def step(self, ids: Ids | None = None, weights: Any = None, tokens: Any = None) -> Iterator[StepScope]:
        """One optimizer update: forward, backward and `optimizer.step()` go inside."""
        self._begin()
        self._scope = scope = self._new_scope()
        try:
            if ids is not None:
                scope.batch(ids, weights, tokens)
            yield scope
            with own_precision(self._device):
                self._end(scope)
        except BaseException:
            self._sound = self._sound and self._reader.reading is None
            raise
        finally:
            self._tap.begin()
            self._reader.end()
            self._scope = None

    def _new_scope(self) -> StepScope:
        bases = None if self._warming_up or self._adaptive.preconditioned else self._projections
        groups = self._form.groups if self._form.split else 1
        every = (self._at - self._began) % CHECK_EVERY < 2
        checked = range(len(self.blocks)) if every else [self._at % len(self.blocks)]
        scope = StepScope(self._at, self.settings.loss_reduction, self.blocks, bases, groups, checked)
        scope.on_batch, scope.id_kind = self._tap.batch, self.store.config.get("ids")
        if self._form.passes:
            scope.curvature = CurvatureRows(self._form, self.settings.seed, self.blocks, bases, self._tap.extra_pass)
        return scope

    @property
    def _warming_up(self) -> bool:
        return self._bases is None or self._at < self._warmup

    def describe(
        self,
        ids: Ids,
        *,
        text: Sequence[str] | None = None,
        image: Sequence[bytes] | None = None,
        label: Sequence[Any] | None = None,
        source: Sequence[str] | None = None,
    ) -> None:
        """Store what a person wants to see of these samples (images as PNG bytes). Stored only if given here."""
        names = label if label is None or isinstance(label, str) else [str(x) for x in label]
        self.store.put_samples(as_text(ids)[0], text=text, image=image, label=names, source=source)

    def flush(self) -> None:
        """Everything recorded so far is on disk when this returns (warm-up steps always are)."""
        self._behind_training(self._behind.wait)
        self._writer.flush()

    # -- one step ------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        if not self._open:
            raise UsageError("rec.step() was called outside of `with backstory.record(...)`.")
        if self._scope is not None:
            raise UsageError("rec.step() was entered inside another rec.step(); steps do not nest.")
        if not self._sound:
            raise UsageError(
                f"an update was made that was not recorded, because its step raised afterwards: the model has left the "
                f"run, which ends at step {self._at}. Load your checkpoint of step {self._at} or earlier, and record on "
                "with resume=True, start=."
            )
        if self._behind.failed:
            self._behind_training(self._behind.wait)
        self._reader.begin()
        self._tap.begin()

    def _add(self, slot: int, block: int, part: Any, group: int | None) -> None:
        if self._scope is not None:
            self._scope.gradients.add(slot, block, part, group)

    def _before_update(self, reading: Reading) -> None:
        """At the moment the optimizer steps: the gradients are still there, and the model has not moved yet."""
        scope = self._scope
        if scope is None:
            return
        if not scope.ids:
            raise UsageError(f"step {scope.number} declared no samples: pass ids to rec.step(), or call s.batch(ids).")
        self._adaptive.check(reading)
        scope.weights()
        if self._form.split:
            scope.terms()
        if scope.curvature is not None:
            scope.curvature.check_complete(scope)
        passes = Passes(self._tap.passes, self._reader.passes, self._tap.differentiable)
        with own_precision(self._device):
            check_sums(scope, self.blocks, reading.clip, self._reader.loss_scale, passes, self._tap.rounded)

    def _after_update(self, reading: Reading) -> None:
        """Once the optimizer has stepped: its second moment is known, and its gradients are still there."""
        scope = self._scope
        if scope is None:
            return
        with torch.no_grad(), own_precision(self._device):
            scope.seen = self._adaptive.look(reading, self._projections)
            if self._warming_up:
                exact_dots(scope, self._adaptive.wholes(reading))

    def _end(self, scope: StepScope) -> None:
        reading = self._reader.reading
        if reading is None:
            self._skip(scope)
            return
        weight = scope.weights()
        done = Done(scope, reading, weight, safe_inverse(weight * self._reader.loss_scale), self._form, self.blocks)
        self._budget.spend(self._at, len(scope.ids))
        if self._warming_up:
            self._keep_for_warmup(done)
        else:
            assert self._projections is not None
            now = not done.finite or any(b.parameter.device.type != "cpu" for b in self.blocks)
            make = partial(record_of, done, self._projections)
            self._behind_training(lambda: self._behind.give(self._at, make, now=now))
        self._note_id_kind(scope)
        self._at += 1
        if self._at in self._boundaries:
            self._behind_training(self._behind.wait)  # a checkpoint of a step that is not recorded would be of no use
            self._checkpoint(self._at)

    def _behind_training(self, work: Callable[[], None]) -> None:
        """Where the step before turns out not to be recordable, the run ends before it."""
        try:
            work()
        except BaseException:
            self._at, self._sound = self._behind.step, False
            raise

    def _skip(self, scope: StepScope) -> None:
        if self._reader.scaler is None:
            raise UsageError(
                f"optimizer.step() was not called inside rec.step() number {scope.number}. Move it inside; if a "
                "GradScaler decides, pass scaler= to backstory.record()."
            )
        self.skipped += 1

    def _note_id_kind(self, scope: StepScope) -> None:
        if self.store.config.get("ids") is None:
            self.store.update_config(ids=scope.id_kind)

    # -- warm-up, checkpoints, the end ---------------------------------------------------------------------------

    def _keep_for_warmup(self, done: Done) -> None:
        scope, meta = done.scope, meta_of(done)
        slots, scales = done.inverse.split(scope.sizes), scope.seen.scales
        found = scope.gradients.parts(scales)
        parts: Parts = {key: divided(part, slots[key[1]]) for key, part in found.items()}
        if scope.curvature is not None:
            first = scope.gradients.groups
            parts |= {(first + r, slot, b): part for (r, slot, b), part in scope.curvature.parts(scales).items()}
        for (_, slot, b), part in parts.items():
            _check_part(scope, slot, self.blocks[b].name, part)
        if self._bases is not None:
            self._writer.put(project_step(scope.number, parts, meta, self.layout, self._bases))
            return
        self._spooled_bytes = spool_step(self.store, scope.number, parts, meta, self._spooled_bytes)
        self._end_warmup_if_enough()

    def _end_warmup_if_enough(self) -> None:
        enough = len(self.store.spooled()) >= self.settings.warmup_steps
        if enough or self._spooled_bytes >= self.settings.warmup_bytes:
            self._end_warmup()

    @own_precision()
    def _end_warmup(self) -> None:
        self._bases, shapes = learn(self.store, self.layout, self.settings.seed)
        self._warmup = len(self.store.spooled())
        self._take_shapes(shapes)
        save_bases(self.store, self.layout, self._bases, self._warmup)
        for spooled in project_spooled(self.store, self.layout, self._bases):
            self._writer.put(spooled)
        self._writer.flush()
        self.store.clear_spool()
        self._move_bases()

    def _take_shapes(self, shapes: Sequence[Shape]) -> None:
        self.blocks = [replace(b, shape=shape) for b, shape in zip(self.blocks, shapes, strict=True)]
        self.layout = [(b.name, b.shape) for b in self.blocks]

    def _move_bases(self) -> None:
        """The bases where the parameters are, ready for the hooks."""
        if self._bases is None:
            return
        self._projections = [
            type(basis)(*(None if x is None else _like(x, block.parameter) for x in basis))
            for basis, block in zip(self._bases, self.blocks, strict=True)
        ]

    def _checkpoint(self, step: int) -> None:
        if self._boundaries:
            self.store.save_tensors(f"checkpoint-{step:08d}", weights_of(self.model))
        known = dict(self.store.config.get("fingerprints", {}))
        if self._adaptive.scales is not None:
            save_scales(self.store, step, [b.name for b in self.blocks], self._adaptive.scales)
        self.store.update_config(fingerprints={**known, str(step): fingerprint(self.model)})

    def _finish(self, failed: bool) -> None:
        try:
            if self._bases is None and self.store.spooled() and not failed:  # else they wait, to be resumed
                self._end_warmup()
            self._behind_training(self._behind.wait)
            self._writer.close()
            if self._sound and self._at == self.store.n_steps():
                self._checkpoint(self._at)
            self.store.update_config(skipped=self.skipped, closed=not failed)
        finally:
            self._behind.close()
            self._writer.close()
            self.store.close()


def _keep_freed_memory() -> None:
    """Let the C library keep up to 64 MiB that were freed, rather than hand them back and ask for them again at every step.

    Recording holds activations a step longer, so more is freed at once. glibc keeps twice the largest block that it has
    seen freed, and looks at blocks below 32 MiB only. Without it a step of 0.7 s paid for 20,000 page faults.
    """
    torch.empty((32 << 20) - (64 << 10), dtype=torch.uint8)


def _boundaries(steps: int | None, checkpoints: int | None) -> set[int]:
    if checkpoints is None or not steps:
        return set()
    return {0, steps} | {round(steps * k / (checkpoints + 1)) for k in range(1, checkpoints + 1)}


def _check_part(scope: StepScope, slot: int, name: str, part: Any) -> None:
    for value in part:
        if value.is_floating_point() and not bool(value.isfinite().all()):
            row = int((~value.flatten(1).isfinite()).any(1).nonzero()[0])
            sample = scope.ids[sum(scope.sizes[:slot]) + row]
            raise NumericalError(
                f"the gradient of sample {sample!r} in step {scope.number} is not finite in {name!r}. The step was not "
                "recorded. Look at that sample's input and loss, or lower the learning rate."
            )


def _like(x: Tensor, parameter: Tensor) -> Tensor:
    wide = torch.promote_types(parameter.dtype, torch.float32)
    return x.to(parameter.device, wide) if x.is_floating_point() else x.to(parameter.device)
