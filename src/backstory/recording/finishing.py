r"""From what a step has gathered to what the store keeps, behind the training.

Projecting rows that had to wait for Adam's second moment is most of what recording costs there, and nothing of it is needed by the
training. It is done in a thread of its own while the next step trains, one step at a time: what a step holds (activations and output
gradients) is let go one step later than without it. (For SGD rows are projected in their hooks; little is left to do here.) A step whose gradient is not finite, and any step on an accelerator (whose work is queued anyway), is
finished at once.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from torch import Tensor

from ..capture.modules import Block
from ..capture.optimizer import Reading
from ..maths.projection import Basis
from ..store import StepRecord
from .settings import CurvatureForm
from .step import StepScope
from .warmup import finished_record


class Done(NamedTuple):
    """A step after its update."""

    scope: StepScope
    reading: Reading
    weight: Tensor  # (B,) w of each sample
    inverse: Tensor  # (B,) 1/(w × loss scale): what arrived in the hooks carries both
    form: CurvatureForm
    blocks: Sequence[Block]

    @property
    def finite(self) -> bool:
        """Whether the step's gradient is."""
        return math.isfinite(self.reading.norm)


class Behind:
    """Finishes steps one behind the training; what goes wrong is raised by the next call."""

    def __init__(self, put: Callable[[StepRecord], None]) -> None:
        self._put = put
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="backstory-rows")
        self._pending: Future[None] | None = None
        self.step = 0  # the one that was given last

    def give(self, step: int, make: Callable[[], StepRecord], *, now: bool = False) -> None:
        """Finish one step with `make`, once the one before it is finished."""
        self.wait()
        self.step = step
        if now:
            self._put(make())
        else:
            self._pending = self._pool.submit(lambda: self._put(make()))

    def wait(self) -> None:
        """Until nothing is pending."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    @property
    def failed(self) -> bool:
        """Whether the next `wait` will raise."""
        return self._pending is not None and self._pending.done() and self._pending.exception() is not None

    def close(self) -> None:
        """End the thread; a pending step is finished, and its failure forgotten."""
        self._pool.shutdown()


def record_of(done: Done, bases: Sequence[Basis]) -> StepRecord:
    """The rows of a step in the run's coordinates, and what was read of it."""
    scope = done.scope
    if scope.bases is None:
        _settle(scope, bases)
    rows = scope.gradients.rows(scope.sizes)
    rows = rows * done.inverse.to(rows.dtype)[:, None, None]
    scope.check_finite(rows)
    curved = None if scope.curvature is None else scope.curvature.rows(scope)
    return finished_record(scope.number, rows, meta_of(done), curved)


def _settle(scope: StepScope, bases: Sequence[Basis]) -> None:
    duals = scope.seen.duals
    scope.gradients.settle(bases, scope.seen.scales, duals)
    scope.gdots = None if duals is None else scope.gradients.settled_dots(scope.sizes)
    if scope.curvature is not None:
        scope.curvature.settle(bases, scope.seen.scales, duals)
        scope.hdots = None if duals is None else scope.curvature.settled_dots(scope.sizes)


def exact_dots(scope: StepScope, wholes: Sequence[Tensor | None] | None) -> None:
    """⟨h, ∇L⟩ of everything that was kept, with ∇L of each block, during a warm-up."""
    if wholes is None:
        return
    scope.gdots = scope.gradients.dots(wholes, scope.sizes)
    scope.hdots = None if scope.curvature is None else scope.curvature.dots(wholes, scope.sizes)


def meta_of(done: Done) -> dict[str, Any]:
    """Everything about a step but its rows, as plain values."""
    scope, reading, form = done.scope, done.reading, done.form
    recorded = {id(b.parameter) for b in done.blocks}
    covered = sum(x for k, x in reading.squares.items() if k in recorded)
    gdots = None if scope.gdots is None else scope.gdots * done.inverse[:, None]  # (B, K)
    return {
        "samples": scope.ids,
        "sizes": scope.sizes,
        "weight": done.weight.tolist(),
        "loss": [None if x != x else x for x in scope.loss_column().tolist()],
        "groups": reading.groups,
        "clip": reading.clip,
        "norm": reading.norm,
        "coverage": reading.share(recorded),
        "trained": reading.coverage(recorded),
        "size": covered if scope.seen.size is None else scope.seen.size,
        "drift": scope.seen.drift,
        "gdot": None if gdots is None else gdots.sum(1).tolist(),
        "hdot": _listed(gdots if form.split else scope.hdots),
        "kappa": _listed(_kappa(done)),
        "gradient_rows": scope.gradients.groups,
        "own_rows": form.rows if scope.curvature is not None else 0,
        **({} if scope.seen.P is None else {"P": scope.seen.P}),
    }


def _kappa(done: Done) -> Tensor | None:
    """κ of each curvature row, (B, R), where there are any."""
    scope = done.scope
    if done.form.split:
        return (done.weight * scope.terms())[:, None].expand(-1, done.form.groups)
    return None if scope.curvature is None else scope.curvature.kappa(done.weight)


def _listed(values: Tensor | None) -> list[Any] | None:
    return None if values is None else values.tolist()
