"""Watching a model and its optimizer, one step at a time: from hooks to a step whose record can be made.

A watcher knows the model, its optimizer and the projection, but no run and no path. What becomes of a step is up to its owner.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ..capture import OptimizerReader, Tap
from ..capture.batches import BatchDigest
from ..capture.modules import Block, Blocks
from ..capture.precision import own_precision
from ..capture.touched import Weights
from ..capture.updates import Reading
from ..errors import UsageError
from ..maths.adam import Scale
from ..maths.layers import Contribution
from ..maths.projection import Basis, Shape
from .adam import Adaptive
from .checks import Passes, check_sums, few_coordinates, left_over
from .contributions import Ahead, joined, places_of
from .curvature import CurvatureRows
from .mixing import FOUND, NOT_FIRST, STATISTICS, Mixing
from .outputs import Loss, OutputWatch
from .projecting import basis_like
from .reduction import check_reduction, check_terms
from .settings import Empirical, Settings
from .step import Part, StepScope, TakenStep, safe_inverse

CHECK_EVERY = 100  # steps between two checks that the rows of all blocks add up to the gradient; else one in turn
CHECKED_FIRST = 2  # steps whose loss must be the declared one


class StepWatcher:
    """Watches a model and its optimizer, one step at a time."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Blocks,
        reader: OptimizerReader,
        adaptive: Adaptive,
        settings: Settings,
        loss_reduction: str,
    ) -> None:
        self.blocks: list[Block] = blocks.blocks
        self.device = self.blocks[0].parameter.device
        self.reader, self.adaptive = reader, adaptive
        self.form = Empirical() if settings.is_open else settings.form
        self.bases: list[Basis] | None = None  # where the parameters are; None while they are not known
        self._seed, self._loss_reduction = settings.seed, loss_reduction
        self._tap = Tap(
            model, blocks, self._add, keep_calls=self.form.passes > 0, groups=self.form.position_groups, batch_dim=settings.batch_dim
        )  # fmt: skip
        self._digest = BatchDigest(model, lambda: self._tap.muted)
        reader.on_step, reader.on_stepped = self._before_update, self._after_update
        self._scope: StepScope | None = None
        self._windows = settings.windows
        self._outputs = OutputWatch(model, self._take_outputs, lambda: self._tap.muted or self._tap.slot is None)
        self._deciding = settings.is_open  # on the curvature, by the first step
        self._open_form = settings.open_form  # what it may decide for
        self.loss: Loss | None = None  # that the outputs go into, where the first step has shown it
        self.missed = 0  # steps whose gradients stand for their curvature
        self._unseen = set[int]()  # the last of them
        self.later: Callable[[int, Callable[[], None], int], None] | None = (
            None  # does work for a step behind the training
        )
        self._known: list[Scale] | None = None  # P^½ that the rows of the step under way have already
        self.weights = Weights([b.parameter for b in self.blocks])
        self._mixing = Mixing(model, self._tap.silent, lambda m: m in self._tap.rules and m not in self._tap.layers)
        self._part: Part | None = None  # of the step under way in the curvature of its window
        self._places: dict[int, Tensor] = {}  # of micro-batches whose samples have several rows: which ones
        self._taken = 0  # steps so far
        self.single: list[
            bool
        ] = []  # of each block: whether samples passed it once, at one position, in the first step

    @property
    def watching(self) -> bool:
        """Whether a step is under way."""
        return self._scope is not None

    @property
    def moved(self) -> bool:
        """Whether the optimizer has stepped in the step under way."""
        return self.reader.reading is not None

    @property
    def shared_statistics(self) -> set[str]:
        """Layers in which samples have shared the statistics of their batch."""
        return self._tap.shared_statistics

    @property
    def layout(self) -> list[tuple[str, Shape]]:
        """Name and shape of each block."""
        return [(b.name, b.shape) for b in self.blocks]

    @property
    def on_cpu(self) -> bool:
        """Whether all recorded parameters are."""
        return all(b.parameter.device.type == "cpu" for b in self.blocks)

    def attach(self) -> None:
        """Install the hooks."""
        self._tap.attach()
        self._digest.attach()
        self.reader.attach()
        if self._deciding or self.loss is not None or not self._taken:
            self._outputs.attach()

    def detach(self) -> None:
        """Remove the hooks."""
        self._tap.detach()
        self._digest.detach()
        self.reader.detach()
        self._outputs.detach()

    def reshape(self, shapes: Sequence[Shape]) -> None:
        """The blocks in other coordinates."""
        self.blocks = [replace(b, shape=shape) for b, shape in zip(self.blocks, shapes, strict=True)]

    def project_with(self, bases: Sequence[Basis]) -> None:
        """From now on rows are projected with these."""
        self.bases = list(map(basis_like, bases, (block.parameter for block in self.blocks)))

    def begin(self, number: int, id_kind: str | None, *, whole: bool, seen: bool = True) -> StepScope:
        """A step begins; with `whole` its contributions are not projected. It has curvature samples if it is `seen`."""
        self.reader.begin()
        self._tap.begin()
        self._digest.begin()
        self._outputs.begin()
        self._places.clear()
        bases = None if whole or self.adaptive.preconditioned else self.bases
        every = self._taken % CHECK_EVERY < 2
        turn = range(len(self.blocks)) if every else [number % len(self.blocks)]
        checked = {n: self._compared(n, bases) for n in turn}
        groups = self.form.position_groups if self.form.split and seen else 1
        self._tap.groups = self.form.position_groups if seen else 1
        self._part = Part(seen, self.adaptive.preconditioned) if self._windows else None
        ahead = None if whole else self._ahead(number)
        self._scope = scope = StepScope(number, self._loss_reduction, self.blocks, bases, groups, checked, ahead)
        scope.on_batch, scope.id_kind, scope.whole = self._begin_batch, id_kind, whole
        scope.is_ours = lambda: self._tap.muted
        with own_precision(self.device):
            scope.stale = left_over(scope, self.blocks)
        if self.form.passes and seen:
            scope.curvature = CurvatureRows(self.form, self._seed, self.blocks, bases, self._tap.extra_pass, ahead)
            scope.watched = self.loss is not None
        return scope

    def _compared(self, number: int, bases: Sequence[Basis] | None) -> tuple[Shape, Basis]:
        """The coordinates in which the rows of a block must add up to its gradient."""
        block = self.blocks[number]
        return few_coordinates(block) if bases is None else (block.shape, bases[number])

    def _ahead(self, number: int) -> Ahead | None:
        """How to project contributions of this step as they come, where P^½ is known before the step."""
        self._known = None if self.bases is None or self.later is None else self.adaptive.known()
        if self._known is None or self.bases is None or self.later is None:
            return None
        return Ahead(
            self.adaptive.sides(self.bases, self._known), partial(self.later, number), self.adaptive.late(self._known)
        )

    @property
    def mixing(self) -> dict[str, str] | None:
        """What was found of samples that affect each other, where `looking` has looked."""
        found = self._mixing.found
        if found is not None and any(place.dim for place in self._tap.layers.values()):
            return dict.fromkeys(found, NOT_FIRST)
        if found is not None and found["layers"] == FOUND and self.shared_statistics:
            return {**found, "layers": STATISTICS}  # which results say in words of their own
        return found

    @property
    def added(self) -> bool:
        """Whether calls of one micro-batch, which have nothing to do with each other, are added up."""
        return self._mixing.added

    @contextmanager
    def looking(self) -> Iterator[None]:
        """During the first step: do the samples of a batch affect each other?"""
        self._tap.on_call = self._mixing.see_call
        try:
            with self._mixing.watching():
                yield
        finally:
            self._tap.on_call = None

    def _begin_batch(self, size: int, rows: list[int] | None) -> None:
        slot = self._tap.batch(size if rows is None else len(rows))
        self._mixing.begin(size if rows is None else len(rows), rows)
        if rows is not None:
            self._places[slot] = places_of(rows, size)

    def know(self, loss: Loss | None) -> None:
        """What the first step has shown, of this recording or of the one that goes on: the curvature that is taken from here on."""
        self._deciding, self.loss, self._outputs.looking = False, loss, False
        if loss is None:
            self._outputs.detach()
            return
        self.form = self._open_form
        self._tap.keep_calls = True

    def _decide(self, scope: StepScope, reading: Reading) -> None:
        """At the end of the first step, which has no curvature samples where the loss can be told. A loss that grows curves the other way."""
        scale = self.reader.loss_scale
        loss = self._outputs.loss([w * scale for w in scope.weights().split(scope.sizes)])
        self.know(loss if reading.sign > 0 else None)
        if self.loss is not None:
            self._part = Part(False, self.adaptive.preconditioned)

    def _take_outputs(self, outputs: Tensor) -> None:
        scope, loss = self._scope, self.loss
        if scope is None or scope.curvature is None or loss is None:
            return
        if scope.curvature.is_complete(scope) or len(outputs) != scope.sizes[-1] or outputs[0].numel() != loss.entries:
            self._unsee(scope)  # the model is called again, or for something else
        else:
            scope.curvature.take(scope, outputs, loss.kind, None, loss.reduction)

    def _take_own(self, scope: StepScope) -> None:
        """What the outputs say of each sample's own curvature; where they were not to be seen, it is that of its gradient."""
        if not self.form.own:
            return
        scope.loss, scope.seen = self.loss, self._outputs.taken(scope.sizes)
        if scope.seen is None:
            self._unsee(scope)

    def _unsee(self, scope: StepScope) -> None:
        """The step's gradients stand for its curvature: its outputs were not to be seen once for each micro-batch."""
        scope.curvature = None
        self.missed += scope.number not in self._unseen
        self._unseen = {scope.number}

    def end(self) -> TakenStep | None:
        """The step is complete; None where the optimizer has not stepped."""
        scope, reading = self._scope, self.reader.reading
        assert scope is not None
        scope.digest = self._digest.end()
        if reading is None:
            return None
        if not self._taken:
            positions = scope.gradients.positions()
            self.single = [positions.get(b) == 1 for b in range(len(self.blocks))]
        self._taken += 1
        weight = scope.weights()
        inverse = safe_inverse(weight * self.reader.loss_scale * reading.sign)
        scales, bases = scope.after.scales, self.bases
        sides = None if scales is None or bases is None else self.adaptive.sides(bases, scales)
        return TakenStep(scope, reading, weight, inverse, self.form, self.blocks, self._part, sides)

    def drop(self) -> None:
        """The step under way is none: nothing more is made of it."""
        if self._scope is not None:
            self._scope.drop()

    def forget(self) -> None:
        """Let go of the step, complete or not."""
        self._tap.begin()
        self._digest.end()
        self.reader.end()
        self._scope = None

    def _add(self, slot: int, block: int, part: Contribution, group: int | None) -> None:
        if self._scope is not None:
            whole = joined(part, self._places[slot]) if slot in self._places else part
            self._scope.gradients.add(slot, block, whole, group)

    def _before_update(self, reading: Reading) -> None:
        """At the moment the optimizer steps: the gradients are still there, and the model has not moved yet."""
        scope = self._scope
        if scope is None:
            return
        if not scope.ids:
            raise UsageError(f"step {scope.number} declares no samples. Pass ids to rec.step(), or call s.batch(ids).")
        self.weights.start()
        self.adaptive.check(reading)
        scope.weights()
        if self.form.split:
            scope.terms()
        if scope.curvature is not None and scope.watched and not scope.curvature.is_complete(scope):
            self._unsee(scope)
        if scope.curvature is not None:
            scope.curvature.check_complete(scope)
        terms = None if self._taken else self._outputs.terms(scope.sizes)
        if self._deciding:
            self._decide(scope, reading)
        elif not self._taken and self.loss is None:
            self._outputs.detach()
        self._take_own(scope)
        passes = Passes(self._tap.passes, self.reader.passes, self._tap.differentiable)
        with own_precision(self.device):
            check_sums(scope, self.blocks, reading.clip, self.reader.loss_scale, passes, self._tap.rounded)
        scope.gradients.end_checks()
        if self._taken < CHECKED_FIRST:
            check_reduction(scope, self.reader.loss_scale)
        if terms is not None and not scope.loss_gradients:
            check_terms(scope, self.reader.loss_scale, terms)

    def _after_update(self, reading: Reading) -> None:
        """Once the optimizer has stepped: its second moment is known, and its gradients are still there."""
        scope = self._scope
        if scope is None:
            return
        self.weights.leave()
        with torch.no_grad(), own_precision(self.device):
            scope.after = self.adaptive.read(reading, self.bases, self._known, scope.gradients.looked_up())
            if scope.whole:
                scope.take_exact_dots(self.adaptive.wholes(reading))
