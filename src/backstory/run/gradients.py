r"""A question in the run's coordinates: v = ∇ℓ(θ, q), one row for each query.

A loss vector of Q entries is Q queries, a scalar is one. Where entry q depends on sample q of the batch alone, all rows
come from one backward pass through the recording hooks; that this is so is *checked*, by comparing a random combination
of the rows with autograd's. Otherwise each entry gets a backward pass of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture import Tap
from ..capture.model_state import in_mode
from ..capture.modules import Block, Blocks
from ..capture.precision import own_precision
from ..errors import BackstoryError, NumericalError, UsageError
from ..maths.adam import Scale, scaled
from ..maths.layers import Contribution, Dense
from ..maths.projection import Basis, project

LossFn = Callable[[nn.Module, Any], Tensor]


def query_rows(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    blocks: Blocks,
    bases: Sequence[Basis],
    scales: Sequence[Scale] | None = None,
    *,
    mode: str = "eval",
) -> Tensor:
    """Gradients of the queries, (Q, Σ dims), on the CPU; with `scales`, in Adam's coordinates."""
    found = [None] * len(bases) if scales is None else scales
    where = [_Place(*x) for x in zip(blocks.blocks, bases, found, strict=True)]
    with _mode(model, mode, _leaves(blocks)), torch.enable_grad():
        rows = _together(model, loss_fn, batch, blocks, where)
        if rows is None:
            rows = _one_by_one(_losses(loss_fn, model, batch), where)
    if not bool(rows.isfinite().all()):
        bad = int((~rows.isfinite()).any(1).nonzero()[0])
        raise NumericalError(f"the gradient of query {bad} has NaN or Inf; look at its input and loss.")
    return rows


def _losses(loss_fn: LossFn, model: nn.Module, batch: Any) -> Tensor:
    losses = loss_fn(model, batch)
    if not isinstance(losses, Tensor) or losses.dim() > 1 or losses.numel() == 0:
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise UsageError(f"loss_fn(model, batch) gave {found}; expected a scalar, or one loss for each query (Q,).")
    if not losses.requires_grad:
        raise UsageError(
            "the query's loss does not depend on the model's parameters; is something detached in loss_fn?"
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

    def rows(self, part: Contribution) -> Tensor:
        """(Q, dims)."""
        moved = part if self._scale is None else scaled(part, self._scale, self.block.shape)
        return project(moved, self.block.shape, self._basis)


def _one_by_one(losses: Tensor, where: Sequence[_Place]) -> Tensor:
    parameters = [x.block.parameter for x in where]
    rows = []
    for q in range(len(losses)):
        grads = _gradients(losses[q], parameters, retain_graph=q + 1 < len(losses))
        if all(g is None for g in grads):
            raise UsageError(
                f"the loss of query {q} depends on none of the recorded parameters; ask about another output."
            )
        rows.append(_project(grads, where))
    return torch.stack(rows)


def _gradients(loss: Tensor, parameters: Sequence[Tensor], *, retain_graph: bool = False) -> Sequence[Tensor | None]:
    """The backward pass lies outside of autocast, whatever surrounds the question."""
    with own_precision(loss.device):
        return torch.autograd.grad(loss, parameters, retain_graph=retain_graph, allow_unused=True)


def _project(grads: Sequence[Tensor | None], where: Sequence[_Place]) -> Tensor:
    parts = []
    for grad, place in zip(grads, where, strict=True):
        if grad is None:
            parts.append(torch.zeros(place.dims))
            continue
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32))
        with own_precision(wide.device):
            parts.append(place.rows(Dense(wide[None]))[0].cpu())
    wide_type = torch.float64 if any(x.dtype == torch.float64 for x in parts) else torch.float32
    return torch.cat([x.to(wide_type) for x in parts])


def _together(model: nn.Module, loss_fn: LossFn, batch: Any, blocks: Blocks, where: Sequence[_Place]) -> Tensor | None:
    """All rows from one backward pass, or None where the queries are not the samples of the batch.

    A second try knows how many queries there are, and tells positions that are looked up once for all of them apart by query.
    """
    rows, count = _tried(model, loss_fn, batch, blocks, where, 0)
    if rows is None and count > 1:
        try:
            rows, _ = _tried(model, loss_fn, batch, blocks, where, count)
        except RuntimeError:  # the queries are not the samples, so what was told apart by query does not fit
            return None
    return rows


def _tried(
    model: nn.Module, loss_fn: LossFn, batch: Any, blocks: Blocks, where: Sequence[_Place], known: int
) -> tuple[Tensor | None, int]:
    """`(rows, or None where they are not right; how many queries there are)`; `known` is 0 where that is not known yet."""
    found: dict[int, Tensor] = {}

    def sink(slot: int, block: int, part: Contribution, group: int | None) -> None:
        row = where[block].rows(part)
        found[block] = found[block] + row if block in found else row

    tap, count = Tap(model, blocks, sink), 0
    tap.attach()
    try:
        tap.batch(known)
        losses = _losses(loss_fn, model, batch)
        count = len(losses)
        if count == 1:
            return None, 1
        tap.sizes = [count]
        _gradients(losses.sum(), _leaves(blocks), retain_graph=True)
    except BackstoryError:
        return None, count  # for example a layer whose batch dimension is not the queries': the slow way decides
    finally:
        tap.detach()
    if not found:
        return None, 1
    rows = _assemble(found, where, count)
    if not bool(rows.isfinite().all()):
        return rows, count  # the query with a NaN is known here; one by one, it would spread to all of them
    return (rows if _agrees(rows, losses, where) else None), count


def _assemble(found: dict[int, Tensor], where: Sequence[_Place], q: int) -> Tensor:
    wide = torch.float64 if any(x.dtype == torch.float64 for x in found.values()) else torch.float32
    parts = [found[b].cpu() if b in found else torch.zeros(q, x.dims) for b, x in enumerate(where)]
    return torch.cat([x.to(wide) for x in parts], 1)


@own_precision()
def _agrees(rows: Tensor, losses: Tensor, where: Sequence[_Place]) -> bool:
    signs = torch.randn(len(losses), generator=torch.Generator().manual_seed(0)).to(losses)
    grads = _gradients((losses * signs).sum(), [x.block.parameter for x in where])
    expected, found = _project(grads, where), signs.cpu().to(rows.dtype) @ rows
    tolerance = 1e-8 if rows.dtype == torch.float64 else 1e-3
    dims = [x.dims for x in where]
    sizes = (signs.abs().cpu().to(rows.dtype) @ rows.abs()).split(dims)  # what rounding may be measured against
    pairs = zip(expected.split(dims), found.split(dims), sizes, strict=True)
    return all(bool((e - f).norm() <= tolerance * (e.norm() + 0.1 * size.norm())) for e, f, size in pairs)


def _leaves(blocks: Blocks) -> list[Tensor]:
    return [b.parameter for b in blocks.blocks]


@contextmanager
def _mode(model: nn.Module, mode: str, leaves: Sequence[Tensor]) -> Iterator[None]:
    """The model in eval or train mode, or as it is, with gradients on; every flag is put back afterwards."""
    if mode not in ("eval", "train", "as-is"):
        raise UsageError(f"found mode={mode!r}; expected 'eval', 'train' or 'as-is'.")
    frozen = [p for p in leaves if not p.requires_grad]
    try:
        for p in frozen:
            p.requires_grad_(True)
        with in_mode(model, None if mode == "as-is" else mode == "train"):
            yield
    finally:
        for p in frozen:
            p.requires_grad_(False)
