r"""Query gradients in the run's coordinates: v = ∇ℓ(θ, q), one per query, for a model whose weights match the run.

A loss vector of Q entries is Q queries, a scalar is one. Where entry q depends on sample q of the batch alone, all rows
come from one backward pass through the recording hooks; that this is so is *checked*, by comparing a random combination
of the rows with autograd's. Otherwise each entry gets a backward pass of its own.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..capture import Tap, canonical, fingerprint
from ..capture.model_state import in_mode
from ..capture.modules import Block, Blocks, owners_of
from ..capture.precision import own_precision
from ..errors import BackstoryError, MismatchError, NumericalError, StoreError, UsageError
from ..maths.adam import Scale, absorb_scale, scale_contribution
from ..maths.layers import Contribution, Dense
from ..maths.projection import Basis, Shape, project, shape_of
from ..store import RunStore
from ..store.bases import load_bases, load_scales
from .graph import Graph, alike, corner, plain_blocks, walk

Evaluated = tuple[int, tuple[bool, ...]]  # of a query's graph, and the modes of the model's modules
LossFn = Callable[..., Tensor]  # (model) or (model, batch) to a scalar, or to one loss for each query (Q,)
T = TypeVar("T")


def query_rows(
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    blocks: Blocks,
    bases: Sequence[Basis],
    scales: Sequence[Scale] | None = None,
    *,
    mode: str = "eval",
    unmixed: set[Evaluated] | None = None,
) -> Tensor:
    """Gradients of the queries, (Q, Σ dims), on the CPU; with `scales`, in Adam's coordinates.

    `unmixed` takes in how queries of this model were evaluated whose losses depend each on its own sample alone.
    """
    sides = [None] * len(bases) if scales is None else scales
    where = [_Place(*x) for x in zip(blocks.blocks, bases, sides, strict=True)]
    with in_query_mode(model, mode, [b.parameter for b in blocks.blocks]), torch.enable_grad():
        rows = _together(model, loss, batch, blocks, where, set() if unmixed is None else unmixed)
        if rows is None:
            rows = _one_by_one(_losses(loss, model, batch), where)
    if not bool(rows.isfinite().all()):
        bad = int((~rows.isfinite()).any(1).nonzero()[0])
        raise NumericalError(f"the gradient of query {bad} has NaN or Inf. Check its input and loss.")
    return rows


def evaluate_loss(loss: LossFn, model: nn.Module, batch: Any = None) -> Tensor:
    """`loss(model)` or `loss(model, batch)`, whichever its signature takes; where it takes both, a batch of None is not passed."""
    try:
        signature = inspect.signature(loss)
    except (TypeError, ValueError):  # some callables of other languages have none
        return loss(model, batch)
    alone, both = _binds(signature, model), _binds(signature, model, batch)
    if not alone and not both:
        raise UsageError(f"the loss must take (model) or (model, batch), but its signature is {signature}.")
    if not both and batch is not None:
        raise UsageError(
            f"a batch was passed, but the loss takes none: its signature is {signature}. Leave the batch out, or "
            "define the loss as (model, batch)."
        )
    return loss(model, batch) if both and not (alone and batch is None) else loss(model)


def _binds(signature: inspect.Signature, *args: Any) -> bool:
    try:
        signature.bind(*args)
    except TypeError:
        return False
    return True


def _losses(loss: LossFn, model: nn.Module, batch: Any) -> Tensor:
    losses = evaluate_loss(loss, model, batch)
    if not isinstance(losses, Tensor) or losses.dim() > 1 or losses.numel() == 0:
        result = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(f"the loss must return a scalar or one loss per query (Q,), got {result}.")
    if not losses.requires_grad:
        raise UsageError(
            "the query's loss does not depend on the model's parameters. Is something detached, or computed under no_grad?"
        )
    return losses.reshape(-1)


class _Place:
    """Where one parameter's gradients go: its coordinates and its projection, beside the parameter."""

    def __init__(self, block: Block, basis: Basis, scale: Scale | None) -> None:
        device = block.parameter.device
        self.block, self.dims = block, block.shape.dims
        self._basis = Basis(*(None if side is None else side.to(device) for side in basis))
        right = None if scale is None or scale.right is None else scale.right.to(device)
        self._scale = None if scale is None else Scale(scale.left.to(device), right)
        sides = [basis.left, basis.right] if block.shape.d_in else [basis.left]
        if self._scale is not None and all(x is not None and x.is_floating_point() for x in sides):
            self._basis, self._scale = (
                absorb_scale(self._basis, self._scale),
                None,
            )  # once, instead of each contribution

    def rows(self, part: Contribution) -> Tensor:
        """(Q, dims)."""
        moved = part if self._scale is None else scale_contribution(part, self._scale, self.block.shape)
        return project(moved, self.block.shape, self._basis)


def _one_by_one(losses: Tensor, where: Sequence[_Place]) -> Tensor:
    rows, parameters = [], [x.block.parameter for x in where]
    for q in range(len(losses)):
        grads = _gradients(losses[q], parameters, retain_graph=q + 1 < len(losses))
        if all(g is None for g in grads):
            raise UsageError(f"the loss of query {q} depends on none of the recorded parameters. Query another output.")
        rows.append(_project(grads, where))
    return torch.stack(rows)


def _gradients(loss: Tensor, targets: Sequence[Any], *, retain_graph: bool = False) -> Sequence[Tensor | None]:
    """The backward pass lies outside of autocast, whatever surrounds the query."""
    with own_precision(loss.device):
        return torch.autograd.grad(loss, targets, retain_graph=retain_graph, allow_unused=True)


def _project(grads: Sequence[Tensor | None], where: Sequence[_Place]) -> Tensor:
    parts = []
    for grad, place in zip(grads, where, strict=True):
        if grad is None:
            parts.append(torch.zeros(place.dims))
            continue
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        with own_precision(wide.device):
            parts.append(place.rows(Dense(wide[None]))[0].cpu())
    return torch.cat(parts)


def _together(
    model: nn.Module, loss: LossFn, batch: Any, blocks: Blocks, where: Sequence[_Place], unmixed: set[Evaluated]
) -> Tensor | None:
    """All rows from one backward pass, or None where the queries are not the samples of the batch.

    A second try knows how many queries there are, and tells positions that are looked up once for all of them apart by query.
    """
    rows, count = _tried(model, loss, batch, blocks, where, 0, unmixed)
    if rows is None and count > 1:
        try:
            rows, _ = _tried(model, loss, batch, blocks, where, count, unmixed)
        except RuntimeError:  # the queries are not the samples, so what was told apart by query does not fit
            return None
    return rows


def _tried(
    model: nn.Module,
    loss: LossFn,
    batch: Any,
    blocks: Blocks,
    where: Sequence[_Place],
    known: int,
    unmixed: set[Evaluated],
) -> tuple[Tensor | None, int]:
    """`(rows, or None where they are not right; how many queries there are)`; `known` is 0 where that is not known yet."""
    taken = _Taken(where)
    tap, count = Tap(model, blocks, taken.take, keep_calls=True), 0
    tap.attach()
    try:
        tap.batch(known)
        losses = _losses(loss, model, batch)
        count = len(losses)
        if count == 1:
            return None, 1
        tap.sizes = [count]
        graph = walk(losses, tap.edges)
        if not graph.deepest:
            return None, 1
        _gradients(losses.sum(), graph.deepest, retain_graph=True)
        rows = taken.all_rows(count)
        if not bool(rows.isfinite().all()):
            return rows, count  # the query with a NaN is known here; one by one, it would spread to all of them
        return (rows if _agrees(rows, losses, where, taken, tap, graph, unmixed) else None), count
    except BackstoryError:
        return None, count  # for example a layer whose batch dimension is not the queries': the slow way decides
    finally:
        tap.detach()


class _Taken:
    """What the hooks give in one backward pass: rows, where they are wanted, and corners of what rows are made of."""

    def __init__(self, where: Sequence[_Place] = ()) -> None:
        self._where = where
        self._rows: dict[int, Tensor] = {}
        self.called = Counter[int]()  # contributions to each block
        self.corners: dict[tuple[int, int], Tensor] = {}  # of each block, those of one size added up

    def take(self, slot: int, block: int, part: Contribution, group: int | None) -> None:
        """One layer call's."""
        few = corner(part)
        key = block, few.shape[1]
        self.corners[key] = self.corners[key] + few if key in self.corners else few
        self.called[block] += 1
        if self._where:
            row = self._where[block].rows(part)
            self._rows[block] = self._rows[block] + row if block in self._rows else row

    def all_rows(self, count: int) -> Tensor:
        """(Q, Σ dims), zeros where nothing came."""
        parts = [
            self._rows[b].cpu() if b in self._rows else torch.zeros(count, x.dims) for b, x in enumerate(self._where)
        ]
        rows = torch.cat(parts, 1)
        return rows.to(torch.promote_types(rows.dtype, torch.float32))


@own_precision()
def _agrees(
    rows: Tensor,
    losses: Tensor,
    where: Sequence[_Place],
    taken: _Taken,
    tap: Tap,
    graph: Graph,
    unmixed: set[Evaluated],
) -> bool:
    """Whether a random combination of the losses has that combination of the rows.

    At every call, so no loss depends on another's sample. And as autograd adds up the gradients of parameters, where they
    are not `plain`. Where the model's own operations were found not to mix samples before, those of the loss are left to check.
    """
    plain = plain_blocks(tap, taken.called, graph.uses)
    numbers = [i for i in range(len(where)) if i not in plain]
    factors = torch.randn(len(losses), generator=torch.Generator().manual_seed(0)).to(losses)
    combined, form = (losses * factors).sum(), (graph.form, tuple(m.training for m in tap.model.modules()))
    if form in unmixed and not numbers:
        again = _Taken()
        tap.sink = again.take
        _gradients(combined, graph.highest, retain_graph=True)
        if again.corners and alike({k: taken.corners[k] for k in again.corners}, again.corners, factors, tap.rounded):
            return True
    again = _Taken()
    tap.sink = again.take
    targets = [*graph.deepest, *(where[i].block.parameter for i in numbers)]
    grads = _gradients(combined, targets)[len(graph.deepest) :]
    if not alike(taken.corners, again.corners, factors, tap.rounded):
        return False
    rest = [rows.split([x.dims for x in where], 1)[i] for i in numbers]
    if not all(_adds_up(g, where[i], row, factors) for g, i, row in zip(grads, numbers, rest, strict=True)):
        return False
    unmixed.add(form)
    return True


def _adds_up(grad: Tensor | None, place: _Place, rows: Tensor, factors: Tensor) -> bool:
    """Whether a parameter's gradient is the combination of its rows."""
    by = factors.cpu().to(rows.dtype)
    expected, combined = _project([grad], [place]), by @ rows
    size = by.abs() @ rows.abs()  # what rounding may be measured against
    tolerance = 1e-8 if rows.dtype == torch.float64 else 1e-3
    return bool((expected - combined).norm() <= tolerance * (expected.norm() + 0.1 * size.norm()))


@contextmanager
def in_query_mode(model: nn.Module, mode: str, leaves: Sequence[Tensor]) -> Iterator[None]:
    """The model in eval or train mode, or as it is, with gradients on; every flag is put back afterwards."""
    if mode not in ("eval", "train", "as-is"):
        raise UsageError(f"mode must be 'eval', 'train' or 'as-is', got {mode!r}.")
    frozen = [p for p in leaves if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with in_mode(model, None if mode == "as-is" else mode == "train"):
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)


class ModelAt:
    """The model of one step in the run's coordinates: checked once, and its projection read once, for many queries."""

    def __init__(
        self,
        store: RunStore,
        model: nn.Module,
        step: int,
        *,
        unverified: bool = False,
        bases: Sequence[Basis] | None = None,
        unmixed: set[Evaluated] | None = None,
    ) -> None:
        self._unmixed = set[Evaluated]() if unmixed is None else unmixed
        self._model, self._blocks = model, blocks_of(store, model)
        self.bases = bases_of(store) if bases is None else bases
        self._checked = check_model(store, model, step, unverified)
        self._scales = load_scales(store, step)

    def gradients(self, loss: LossFn, batch: Any = None, mode: str = "eval") -> tuple[Tensor, list[str]]:
        """`(query gradients (Q, dims), caveats)`."""
        v = query_rows(
            self._model, loss, batch, self._blocks, self.bases, self._scales, mode=mode, unmixed=self._unmixed
        )
        return v, [*self._checked, f"evaluated in {mode} mode"]

    def total_gradient(self, loss: LossFn, pieces: Iterable[Any]) -> tuple[Tensor, list[str]]:
        """`(gradient (1, dims) of the sum of all losses of some batches, caveats)`, one batch at a time."""
        sizes, out, caveats = list[int](), list[Tensor](), list[str]()

        def total(model: nn.Module, batch: Any) -> Tensor:
            losses = loss(model, batch)
            sizes[-1] = losses.numel()
            return losses.sum()

        for batch in pieces:
            sizes.append(0)
            v, caveats = self.gradients(total, batch)
            out.append(v)
        count = sum(sizes)
        more = [f"the text was split into {count} pieces; influence is on the sum of their losses"] if count > 1 else []
        return torch.cat(out).sum(0, keepdim=True), [*caveats, *more]


def evaluate(model: nn.Module, function: Callable[[nn.Module, Any], T], batch: Any) -> T:
    """`function(model, batch)` in eval mode and without gradients; every flag is put back afterwards."""
    with in_mode(model), torch.no_grad():
        return function(model, batch)


def check_model(store: RunStore, model: nn.Module, step: int, unverified: bool = False) -> list[str]:
    """Refuse a model that is not the one of `step`; what could not be checked must be allowed, and is said."""
    fingerprints = store.read_config().get("fingerprints", {})
    known = fingerprints.get(str(step))
    if known is None and not unverified:
        steps = ", ".join(sorted(fingerprints, key=int))
        raise MismatchError(
            f"the run has fingerprints of the weights at steps {steps}, but not at step {step}, so it cannot check "
            "the model. Query one of those steps, record with steps=…, checkpoints=K, or pass unverified=True if you "
            "are sure of the model."
        )
    if known is None:
        return [f"model not verified: the run has no fingerprint of step {step}"]
    if (actual := fingerprint(model)) != known:
        stored = f", or load its weights with run.load_weights(model, {step})" if step in store.checkpoints() else ""
        of = next((t for t, x in fingerprints.items() if x == actual), None)
        if of is None:
            remedy = f"not those of step {step}. Pass the model unchanged and in its original precision"
        else:
            remedy = f"those of step {of}, not of step {step}. Pass {f'at={of}' if int(of) else 'the trained model'}"
        raise MismatchError(f"the model's weights are {remedy}{stored}.")
    return []


def blocks_of(store: RunStore, model: nn.Module) -> Blocks:
    """The recorded parameters, found in `model` by name."""
    parameters = {canonical(n): p for n, p in model.named_parameters(remove_duplicate=False)}
    blocks = []
    for b in store.config["blocks"]:
        recorded = Shape(*b["shape"])
        if b["name"] not in parameters:
            raise MismatchError(f"the model has no parameter {b['name']!r}. Build the model that was recorded.")
        shape = parameters[b["name"]].shape
        if shape_of(shape, None)[:2] != recorded[:2]:
            raise MismatchError(
                f"{b['name']!r} has shape {tuple(shape)} in the model, but {recorded.d_out} × {recorded.d_in or 1} in "
                "the run. Build the model that was recorded."
            )
        blocks.append(Block(b["name"], parameters[b["name"]], b["group"], recorded))
    return owners_of(model, blocks)


def bases_of(store: RunStore) -> list[Basis]:
    """The run's projection."""
    bases = load_bases(store, (b["name"] for b in store.config["blocks"]))
    if bases is None:
        raise StoreError(
            "the run has no projection yet, because recording stopped during warm-up. Resume the recording."
        )
    return bases
