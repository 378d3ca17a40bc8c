r"""One optimizer step: what the user declares, what the hooks collect, and the record made from both.

Backward passes give ∂L/∂s with the sample's weight inside, so what arrives is w_z g_z (times the loss scale of a
GradScaler). The weights are known when the step is complete; rows are then divided by them:

    mean         w = 1 / samples of the step          token-mean   w = 1 / tokens of the step, ℓ a sum over tokens
    sum          w = 1                                weights      as given with each batch
"""

import math
from base64 import b64decode, b64encode
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..capture.hooks import logits_of
from ..capture.ids import as_text, counts, owners
from ..capture.modules import Block
from ..capture.updates import Reading
from ..errors import NumericalError, UsageError, check_one_of
from ..maths.curvature import KINDS, positions
from ..maths.encoding import all_finite
from ..maths.gauss_newton import own_scale, tilt
from ..maths.layers import Plain
from ..maths.projection import Basis, Shape
from ..maths.shared_curvature import dual
from ..maths.steps import loss_divisor
from ..store import StepRecord
from .adam import AfterUpdate
from .contributions import Ahead, Gathered, Parts
from .settings import Curvature

if TYPE_CHECKING:
    from .curvature import CurvatureRows
    from .outputs import Loss, Seen

OUTPUT_KINDS = (*KINDS, "other")
# facts that records hold as they are
PLAIN = ("samples", "groups", "clip", "norm", "coverage", "trained", "size", "drift", "P", "batch", "generators")
Ids = Iterable[int | str] | Tensor


class StepScope:
    """The `s` of `with rec.step() as s`: declare each micro-batch before its forward pass."""

    def __init__(
        self,
        number: int,
        reduction: str,
        blocks: Sequence[Block],
        bases: Sequence[Basis] | None,
        groups: int = 1,
        checked: Mapping[int, tuple[Shape, Basis]] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        self.number, self._blocks = number, blocks
        self.reduction = reduction  # how the step's loss combines the samples' losses
        self.bases = bases  # None: keep the contributions themselves until they can be projected
        # the blocks whose rows must add up to the gradient in this step, and the coordinates in which they are compared
        self.checked = checked or {}
        self.gradients = Gathered(blocks, bases, groups, self.checked, ahead)
        self.ids: list[str] = []
        self.id_kind: str | None = None  # "int" or "str", once known; the recorder fills in the run's
        self.sizes: list[int] = []
        self._weights: list[Tensor | None] = []
        self.tokens: list[Tensor | None] = []
        self._losses: list[Tensor] = []
        self.loss_gradients: dict[
            int, list[Tensor]
        ] = {}  # slot -> ∂L/∂ℓ of each backward pass, where ℓ is in the graph
        self.curvature: CurvatureRows | None = None  # rows beside the gradient's, set by the watcher if there are any
        self.watched = False  # the watcher sees the outputs itself
        # the loss and what was seen of the outputs, where each occurrence keeps its own curvature; None where they were not to be seen
        self.loss: Loss | None = None
        self.seen: list[Seen] | None = None
        self.after = AfterUpdate()  # what the optimizer's state says after the step
        self.gdots: Tensor | None = None  # (B, K) w ⟨g, ∇L⟩ of raw gradients, if clipped in Adam's coordinates
        self.hdots: Tensor | None = None  # (B, R) ⟨h, ∇L⟩ likewise
        self.is_ours: Callable[[], bool] = lambda: (
            False
        )  # whether a backward pass is the recorder's own; set by the watcher
        # set by the watcher: tells the tap how many samples there are, and of which each row is
        self.on_batch: Callable[[int, list[int] | None], object] = lambda size, rows: None
        self.stale: dict[int, Tensor] = {}  # block -> what was in .grad before the step, where the block is checked
        self.whole = False  # contributions are not projected, as during a warm-up
        # for replays, filled in by the recorder: checksums of the batch and of the random states after the step, and the states before
        self.digest: int | None = None
        self.generators: Sequence[int] = ()
        self.random: bytes | None = None
        self.seconds = 0.0  # that the step's own work took

    def batch(
        self,
        ids: Ids,
        weights: Tensor | Sequence[float] | None = None,
        tokens: Tensor | Sequence[int] | None = None,
        groups: Sequence[int] | Tensor | None = None,
    ) -> None:
        """Declare the samples of the next micro-batch, in the order of the batch dimension; one that is drawn twice is listed twice.

        `groups` is for samples of several rows (chosen and rejected answers, choices, views): for each row of the batch, which of `ids`
        it belongs to, as 0, 1, …. Their gradients are added up, and weigh as one sample.
        """
        texts, kind = as_text(ids)
        if not texts:
            raise UsageError(f"step {self.number} declares an empty batch. Pass at least one id.")
        if self.id_kind not in (None, kind):
            raise UsageError(
                f"step {self.number} has {kind} ids, but earlier ones are {self.id_kind}. Use one type throughout."
            )
        self.id_kind = kind
        self.ids += texts
        if (weights is not None) != (self.reduction == "weights"):
            raise UsageError(
                f"weights= and loss_reduction='weights' go together, got loss_reduction={self.reduction!r} "
                f"{'with' if weights is not None else 'without'} weights. Pass both, or neither."
            )
        given = None if weights is None else _weights(weights, len(texts), self.number)
        self.sizes.append(len(texts))
        self._weights.append(given)
        self.tokens.append(None if tokens is None else counts(tokens, len(texts)))
        self._losses.append(torch.full((len(texts),), math.nan, dtype=torch.float64))
        self.on_batch(len(texts), None if groups is None else owners(groups, len(texts)))

    def weigh(self, slot: int, weights: Tensor | Sequence[float]) -> None:
        """Replace the weights of micro-batch `slot`, where they are known only after its forward pass."""
        if self.reduction != "weights":
            raise UsageError(f"loss_reduction must be 'weights' to set weights, got {self.reduction!r}.")
        self._weights[slot] = _weights(weights, self.sizes[slot], self.number)

    def outputs(self, logits: Tensor, kind: str, mask: Tensor | None = None, reduction: str | None = None) -> None:
        """Pass the model's outputs for the current micro-batch, before `backward()`; classes are the last dimension.

        `mask` (B, S) marks the positions that have a loss; `reduction` is "sum" or "mean": how a sample's own loss combines
        its positions. Curvature other than empirical is computed here.
        """
        self._need_batch("outputs")
        check_one_of("kind", kind, OUTPUT_KINDS)
        if len(logits) != self.sizes[-1]:
            raise UsageError(
                f"outputs must have one row for each of the {self.sizes[-1]} samples of the batch, got {len(logits)}."
            )
        if mask is not None and self.tokens[-1] is None:
            self.tokens[-1] = counts(mask.reshape(len(mask), -1).sum(1), self.sizes[-1])
        if self.curvature is not None and not self.watched:
            self._check_terms(logits, kind, mask)
            self.curvature.take(self, logits, kind, mask, reduction)

    def _check_terms(self, logits: Tensor, kind: str, mask: Tensor | None) -> None:
        """Positions without a loss have no curvature either: as many must have one as the sample has tokens."""
        tokens = self.tokens[-1]
        if self.reduction != "token-mean" or tokens is None or kind not in KINDS:
            return
        terms = positions(logits, kind, mask)
        if bool((wrong := terms != tokens).any()):
            sample = int(wrong.nonzero()[0])
            raise UsageError(
                f"sample {self.ids[-self.sizes[-1] + sample]!r} has {int(tokens[sample])} tokens with a loss, but outputs at "
                f"{int(terms[sample])} positions. Pass mask= (B, S), which marks the positions that have a loss."
            )

    @contextmanager
    def outputs_of(
        self, model: nn.Module, kind: str, reduction: str | None = None, mask: Tensor | None = None
    ) -> Iterator[None]:
        """Inside, pass on the outputs of `model` (their `logits`, if any) where curvature needs them."""
        if self.curvature is None or self.watched:
            yield
            return

        def take(module: nn.Module, args: Any, out: Any) -> None:
            self.outputs(logits_of(out), kind, mask, reduction)

        with model.register_forward_hook(take):
            yield

    def losses(self, per_sample: Tensor) -> None:
        """Pass the loss ℓ of each sample of the current micro-batch, not multiplied by its weight.

        If the training loss is computed from this tensor, `loss_reduction` is checked against its gradient in the first steps.
        """
        self._need_batch("losses")
        self._losses[-1] = _vector(per_sample, self.sizes[-1], "losses")
        if isinstance(per_sample, Tensor) and per_sample.grad_fn is not None:
            passes = self.loss_gradients.setdefault(len(self.sizes) - 1, [])
            per_sample.register_hook(lambda x: None if self.is_ours() else passes.append(x))

    def weights(self) -> Tensor:
        """w_z of every sample of the step, float64."""
        n = len(self.ids)
        if self.reduction == "weights":
            return torch.cat([w for w in self._weights if w is not None])
        if self.reduction == "mean" and len(set(self.sizes)) > 1:
            raise UsageError(
                f"step {self.number} accumulates micro-batches of unequal sizes {self.sizes}, so "
                "loss_reduction='mean' does not define the sample weights. Use loss_reduction='weights' and pass "
                "weights= with each batch."
            )
        tokens = [t for t in self.tokens if t is not None]
        if self.reduction == "token-mean" and len(tokens) < len(self.sizes):
            raise UsageError(
                "loss_reduction='token-mean' needs the token count of each sample. Pass tokens= to s.batch(), or "
                "mask= to s.outputs()."
            )
        divisor = loss_divisor(self.reduction, n, torch.cat(tokens) if tokens else None)
        return torch.full((n,), 1.0 / divisor, dtype=torch.float64)

    def loss_column(self) -> Tensor:
        """Given losses, NaN where none were given: (B,)."""
        return torch.cat(self._losses)

    def terms(self) -> Tensor:
        """How many loss terms each sample's own loss is the mean of, (B,): 1 where it is their sum."""
        if self.reduction == "token-mean":
            return torch.ones(len(self.ids), dtype=torch.float64)
        known = [t for t in self.tokens if t is not None]
        if len(known) < len(self.sizes):
            raise UsageError(
                f"curvature by position groups with loss_reduction={self.reduction!r} needs the number of terms that "
                "each sample's loss averages over. Pass tokens= to s.batch() (1 if the loss is a sum), or mask= to s.outputs()."
            )
        return torch.cat(known).double().clamp_min(1)

    def check_finite(self, rows: Tensor) -> None:
        """NaN or Inf in a row (B, …, Σ dims): name step, layer and sample."""
        if all_finite(rows):
            return
        rows = rows.flatten(1, -2).sum(1) if rows.dim() > 2 else rows
        row, column = (~rows.isfinite()).nonzero()[0].tolist()
        ends = list(accumulate(block.shape.dims for block in self._blocks))
        raise NumericalError(
            f"the gradient of sample {self.ids[row]!r} in step {self.number} has {rows[row, column].item()} in "
            f"{self._blocks[bisect_right(ends, column)].name!r}. The step was not recorded. Check that sample's input and loss, or lower the learning rate."
        )

    def drop(self) -> None:
        """The step is none."""
        for one in (self.gradients, *(self.curvature.passes if self.curvature is not None else ())):
            one.drop()

    def settle(self, bases: Sequence[Basis], sides: Sequence[Basis]) -> None:
        """Project what had to wait for the optimizer's second moment."""
        duals = self.after.duals
        self.gradients.settle(bases, sides, duals)
        self.gdots = None if duals is None else self.gradients.settled_dots(self.sizes)
        if self.curvature is not None:
            self.curvature.settle(bases, sides, duals)
            self.hdots = None if duals is None else self.curvature.settled_dots(self.sizes)

    def take_exact_dots(self, wholes: Sequence[Tensor | None] | None) -> None:
        """⟨h, ∇L⟩ of everything that waits, with ∇L of each block, where contributions are not projected."""
        if wholes is None:
            return
        self.gdots = self.gradients.dots(wholes, self.sizes)
        self.hdots = None if self.curvature is None else self.curvature.dots(wholes, self.sizes)

    def _need_batch(self, what: str) -> None:
        if not self.sizes:
            raise UsageError(f"s.{what}() was called before s.batch(ids). Declare the micro-batch first.")


class Part(NamedTuple):
    """What a step is to the curvature of its window."""

    seen: bool  # whether it gives rows
    dual: bool  # whether ∇L of a clipped step must be kept: rows are in Adam's coordinates


class TakenStep(NamedTuple):
    """A step after its update."""

    scope: StepScope
    reading: Reading
    weight: Tensor  # (B,) w of each sample
    inverse: Tensor  # (B,) ±1/(w × loss scale): what arrived in the hooks carries both; − where L is maximized, rows are those of −ℓ
    form: Curvature
    blocks: Sequence[Block]
    part: Part | None = None  # what the step is to the curvature of its window, where there are windows
    sides: Sequence[Basis] | None = None  # that project what waits, where P^½ of the step is known to them

    @property
    def finite(self) -> bool:
        """Whether the step's gradient is."""
        return math.isfinite(self.reading.norm)

    def record(self, bases: Sequence[Basis]) -> StepRecord:
        """The rows of the step in the coordinates of `bases`, and what was read of it."""
        scope = self.scope
        if scope.bases is None:
            scope.settle(bases, [x._replace(core=None) for x in bases] if self.sides is None else self.sides)
        rows = scope.gradients.rows(scope.sizes)
        rows = rows * self.inverse.to(rows.dtype)[:, None, None]
        scope.check_finite(rows)
        curved = None if scope.curvature is None else scope.curvature.rows(scope)
        return self.keep(make_record(scope.number, rows, self.facts(), curved))

    def keep(self, record: StepRecord) -> StepRecord:
        """The record of this step, with its curvature samples or its part in the window's."""
        return record if self.part is None else share(record, self.part)

    def take_parts(self) -> Parts:
        """What was contributed to each row, merged and on the CPU, while its projection is not known."""
        scope, slots, scales = self.scope, self.inverse.split(self.scope.sizes), self.scope.after.scales
        out = scope.gradients.take_parts(scales, slots)
        if scope.curvature is not None:
            first = scope.gradients.groups
            out |= {(first + r, slot, b): part for (r, slot, b), part in scope.curvature.take_parts(scales).items()}
        for (_, slot, b), part in out.items():
            _check_part(scope, slot, self.blocks[b].name, part)
        return out

    def facts(self) -> dict[str, Any]:
        """Everything about the step but its rows, as plain values."""
        scope, reading = self.scope, self.reading
        recorded = {id(b.parameter) for b in self.blocks}
        covered = sum(x for k, x in reading.squares.items() if k in recorded)
        gdots = None if scope.gdots is None else scope.gdots * self.inverse.abs()[:, None]  # (B, K) ⟨−g, −∇L⟩ = ⟨g, ∇L⟩
        hdots = None if scope.hdots is None else scope.hdots * reading.sign
        return {
            "samples": scope.ids,
            "sizes": scope.sizes,
            "weight": self.weight.tolist(),
            "loss": [None if x != x else x for x in scope.loss_column().tolist()],
            "groups": reading.groups,
            "clip": reading.clip,
            "norm": reading.norm,
            "coverage": reading.share(recorded),
            "trained": reading.share(recorded, updated=True),
            "size": covered if scope.after.size is None else scope.after.size,
            "drift": scope.after.drift,
            "gdot": None if gdots is None else gdots.sum(1).tolist(),
            "hdot": _listed(gdots if self.form.split else hdots),
            "kappa": _listed(self._kappa()),
            "gradient_rows": scope.gradients.groups,
            "own_rows": self.form.rows if scope.curvature is not None else 0,
            "own": _listed(self._own()),
            "tilt": _listed(self._tilt()),
            "part": None if self.part is None else list(self.part),
            "batch": scope.digest,
            "generators": list(scope.generators),
            "random": None if scope.random is None else b64encode(scope.random).decode(),
            **({} if scope.after.P is None else {"P": scope.after.P}),
        }

    def _own(self) -> Tensor | None:
        """κ of each sample's own gradient, (B,), where it is kept: 1 where the outputs were not to be seen."""
        scope, loss = self.scope, self.scope.loss
        if not self.form.own:
            return None
        if scope.seen is None or loss is None:
            return torch.ones(len(scope.ids), dtype=torch.float64)
        return torch.cat([own_scale(x.f, delta, loss.kind, loss.inner).cpu() for x, delta in self._deltas(scope.seen)])

    def _tilt(self) -> Tensor | None:
        """How much of its gradient is taken out of each curvature row, (B, R)."""
        scope, loss = self.scope, self.scope.loss
        if not self.form.own or scope.curvature is None or scope.seen is None or loss is None:
            return None
        slots = zip(self._deltas(scope.seen), scope.curvature.seeds, strict=True)
        parts = [[tilt(x.f, delta, u, loss.kind, loss.inner) for u in seeds] for (x, delta), seeds in slots]
        return torch.cat([torch.stack(part, 1).cpu() for part in parts])

    def _deltas(self, seen: "list[Seen]") -> Iterator[tuple["Seen", Tensor]]:
        """Each micro-batch's outputs, and ∂ℓ/∂f of its samples, float64."""
        for x, inverse in zip(seen, self.inverse.split(self.scope.sizes), strict=True):
            yield x, x.delta.double() * inverse.to(x.delta.device).reshape(-1, *[1] * (x.delta.dim() - 1))

    def _kappa(self) -> Tensor | None:
        """κ of each curvature row, (B, R), where there are any."""
        if self.form.split:
            return (self.weight * self.scope.terms())[:, None].expand(-1, self.scope.gradients.groups)
        return None if self.scope.curvature is None else self.scope.curvature.kappa(self.weight)


def make_record(step: int, gradients: Tensor, facts: Mapping[str, Any], curvature: Tensor | None = None) -> StepRecord:
    """Gradients (B, K, p) and what was read of the step, as the store keeps them.

    Where they are taken apart (K > 1) and there are no curvature rows beside them, they are the curvature rows.
    ⟨g, ∇L⟩ is what `facts` say, or else taken in the kept coordinates.
    """
    rows = gradients.sum(1) if gradients.shape[1] > 1 else gradients[:, 0]
    curvature = gradients if curvature is None and gradients.shape[1] > 1 else curvature
    weight = torch.tensor(facts["weight"], dtype=torch.float64)
    wide = rows.double()
    whole = weight @ wide  # (p,) the step's gradient in the kept coordinates
    gdot, hdot, tilted, own = (
        None if facts.get(name) is None else torch.tensor(facts[name], dtype=torch.float64)
        for name in ("gdot", "hdot", "tilt", "own")
    )
    gdot = wide @ whole if gdot is None else gdot
    if curvature is not None and tilted is not None:  # the rest: what gradients do not hold
        curvature = curvature - tilted.to(curvature)[..., None] * rows[:, None]
        hdot = None if hdot is None else hdot - tilted * gdot[:, None]
    if hdot is None and curvature is not None:
        hdot = curvature.double() @ whole
    plain: dict[str, Any] = {name: facts.get(name) for name in PLAIN}
    return StepRecord(
        step=step,
        weight=weight,
        loss=torch.tensor([float("nan") if x is None else x for x in facts["loss"]], dtype=torch.float64),
        gdot=gdot,
        own=own,
        rows=rows,
        curvature=curvature,
        kappa=None if curvature is None else torch.tensor(facts["kappa"], dtype=torch.float64),
        hdot=hdot,
        random=None if facts["random"] is None else b64decode(facts["random"]),
        **plain,
    )


def share(record: StepRecord, part: Part) -> StepRecord:
    """The record of a step that shares the curvature of its window: its samples' rows √κ h go there, where the step is seen.

    Where occurrences keep their own curvature, these are rows of the rest alone.
    """
    V, dot_v = None, None
    if record.curvature is not None and record.kappa is not None and record.hdot is not None:
        root = record.kappa.flatten().sqrt()
        V, dot_v = root.to(record.rows)[:, None] * record.curvature.flatten(0, 1), root * record.hdot.flatten()
    known = dual(record.weight, record.rows, record.gdot, V, dot_v) if part.dual and record.clip < 1 else None
    if V is None and record.own is None:
        V = record.weight.sqrt().to(record.rows)[:, None] * record.rows
    shared = V if part.seen else None
    return replace(record, curvature=None, kappa=None, hdot=None, shared=shared, dual=known)


def safe_inverse(x: Tensor) -> Tensor:
    """1/x, and 0 where x = 0: a sample without weight leaves no row."""
    return torch.where(x == 0, torch.zeros_like(x), 1.0 / torch.where(x == 0, torch.ones_like(x), x))


def _check_part(scope: StepScope, slot: int, name: str, part: Plain) -> None:
    for value in part:
        if value.is_floating_point() and not bool(value.isfinite().all()):
            row = int((~value.flatten(1).isfinite()).any(1).nonzero()[0])
            sample = scope.ids[sum(scope.sizes[:slot]) + row]
            raise NumericalError(
                f"the gradient of sample {sample!r} in step {scope.number} is NaN or Inf in {name!r}. The step was "
                "not recorded. Check that sample's input and loss, or lower the learning rate."
            )


def _listed(values: Tensor | None) -> list[Any] | None:
    return None if values is None else values.tolist()


def _weights(x: Tensor | Sequence[float], n: int, step: int) -> Tensor:
    weights = _vector(x, n, "weights")
    if bool((weights < 0).any()):
        raise UsageError(f"weights must be ≥ 0, got a negative one in step {step}.")
    return weights


def _vector(x: Tensor | Sequence[float], n: int, what: str) -> Tensor:
    values = x if isinstance(x, Tensor) else torch.tensor(list(x), dtype=torch.float64)
    values = values.detach().double().cpu().reshape(-1)
    if len(values) != n:
        raise UsageError(f"{what} must have one value per sample, got {len(values)} for {n} samples.")
    if not bool(values.isfinite().all()):
        raise NumericalError(f"{what} of the batch contain NaN or Inf.")
    return values
