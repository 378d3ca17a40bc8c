r"""The safety check of recording: per-sample gradients must add up to the gradient that torch computed.

    Σ_z w_z g_z  =  ∇L      for each parameter, in the kept coordinates

A weight that is used outside its module's forward, a module that was compiled away, a batch dimension that is not
the first, or a stale `.grad` from before the step all break this identity, and would otherwise pass silently.

Both sides sum the same terms, δ_t a_tᵀ of every sample and position t, in different orders. Where the terms cancel, what is
left is rounding: the key bias of softmax attention and a bias before InstanceNorm have a gradient of exactly 0, and so has each
sample's row. With n terms and the unit roundoff u the two sums may lie apart by

    c √n u Σ_t ‖δ_t‖ ‖a_t‖      (Higham & Mary's probabilistic bound)

Measured where terms cancel, on key biases, other weights of attention, convolutions and a million terms of mean 0, they lie at most
5 u Σ ‖δ_t‖ ‖a_t‖ apart, however many they are; so √n is taken for 64 terms at most. Where they do not cancel, the tolerance is larger.
Where a module is repeated as a whole (`capture.general`), what cancels inside is not seen: a parameter whose gradient is 0 may be off by
64 u of the gradient of all parameters.
A layer that is called several times in half precision has its gradient rounded to that precision after each call.
"""

from collections.abc import Collection, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ..capture.modules import Block
from ..errors import CoverageError
from ..maths.projection import Basis, Shape, project_dense, random_basis
from .projecting import basis_like
from .step import StepScope

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative
HALF_TOLERANCE = 5e-2  # half precision, of the gradient itself or inside autocast
SUMMING = 8.0  # c above
MANY = 64  # n above, at most
ROUNDED = 4.0  # units of half precision by which the gradients of a layer's calls may be off together
ALIKE = 0.05  # a rest that differs from a multiple of the parameter by less than this is called one
COORDINATES = 8  # with fewer, everything is nearly a multiple of the parameter

CAUSES = (
    "Likely causes: the forward pass ran outside rec.step(); gradients from before the step were not zeroed; the "
    "weight is used outside its module's forward (nn.MultiheadAttention, functional calls); a loss term depends on "
    "the weights directly; an in-place operation changes the output of a module that has no layer rule; the module was compiled or replaced; something was added to .grad after backward(); a custom rule is wrong. Fix "
    "the cause, or exclude the layer with layers=['!name']."
)


class Passes(NamedTuple):
    """The backward passes of a step, by torch's own numbers."""

    recorded: Collection[int]  # they reached a recorded layer
    accumulated: Collection[int]  # they added to a parameter's gradient
    differentiable: bool  # one of them ran with create_graph=True


def check_sums(
    scope: StepScope, blocks: Sequence[Block], clip: float, scale: float, passes: Passes, rounded: Collection[int] = ()
) -> None:
    """Raise if the recorded rows of a checked block do not add up to its gradient, times the clipping factor.

    `rounded` are the blocks whose layers ran in half precision: their gradient is that much coarser than its type.
    """
    wrong = [
        x for number in scope.checked if (x := _miss(scope, blocks[number], number, clip / scale, number in rounded))
    ]
    wrong = [x for x in wrong if not _is_rounding(x, blocks)]
    if wrong:
        rest, theta, stale = (torch.cat(x) for x in zip(*((x.rest, x.theta, x.stale) for x in wrong), strict=True))
        if any((rest - factor * stale).norm() < ALIKE * rest.norm() for factor in (clip, clip / scale)):
            cause = (
                "Gradients of an earlier backward pass were still there: call optimizer.zero_grad() before each step. To "
                "accumulate gradients, run every backward pass inside rec.step(), with s.batch(ids) for each micro-batch."
            )
        else:
            cause = _cause(passes, scope, rest, theta, clip)
        raise CoverageError(
            f"the per-sample gradients of {wrong[0].name!r} do not add up to its gradient in step {scope.number} (off "
            f"by {wrong[0].off:.1%}). {cause}"
        )


def _is_rounding(miss: "Miss", blocks: Sequence[Block]) -> bool:
    """Whether what is off is no more than rounding of the gradient of all parameters."""
    norms = [x.grad.norm().double() for x in (b.parameter for b in blocks) if x.grad is not None]
    unit = torch.finfo(torch.promote_types(blocks[0].parameter.dtype, torch.float32)).eps / 2
    return bool(miss.rest.norm() <= MANY * unit * torch.stack(norms).norm())


def left_over(scope: StepScope, blocks: Sequence[Block]) -> dict[int, Tensor]:
    """The gradients that checked blocks have before the step, in the coordinates of the check."""
    grads = {number: blocks[number].parameter.grad for number in scope.checked}
    return {n: _project(x, *scope.checked[n]).clone() for n, x in grads.items() if x is not None}


class Miss(NamedTuple):
    """A parameter whose rows do not add up, in the kept coordinates."""

    name: str
    off: float  # ‖rest‖ / ‖∇L‖
    rest: Tensor  # (dims,) ∇L − Σ w g
    theta: Tensor  # (dims,) the parameter itself
    stale: Tensor  # (dims,) its gradient before the step


def _miss(scope: StepScope, block: Block, number: int, factor: float, rounded: bool) -> Miss | None:
    grad = block.parameter.grad
    if grad is None:
        return None
    shape, basis = scope.checked[number]
    expected = _project(grad, shape, basis)
    total, size = scope.gradients.total(number)
    rest = expected - total.double() * factor
    half = rounded or grad.dtype not in TOLERANCE
    tolerance = HALF_TOLERANCE if half else TOLERANCE[grad.dtype]
    near = tolerance * expected.norm() + 0.1 * tolerance * size.double() * factor
    if not rest.norm() > near:  # NaN is named where rows are looked at one by one
        return None
    if not rest.norm() > near + _summing(scope, number, shape, grad.dtype, half) * factor:
        return None
    off = float(rest.norm() / expected.norm().clamp_min(1e-300))
    stale = scope.stale.get(number, torch.zeros_like(rest))
    return Miss(block.name, off, rest, _project(block.parameter, shape, basis), stale)


def _summing(scope: StepScope, number: int, shape: Shape, dtype: torch.dtype, half: bool) -> Tensor:
    """How far two sums of the block's terms may lie apart."""
    terms = scope.gradients.terms(number)
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    apart = SUMMING * sqrt(min(terms.count + shape.d_out + shape.d_in, MANY)) * unit * terms.size
    return apart + (ROUNDED * torch.finfo(torch.bfloat16).eps / 2 * terms.vectors if half else 0.0)


def _project(x: Tensor, shape: Shape, basis: Basis) -> Tensor:
    wide = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    return project_dense(wide[None], shape, basis)[0].double()  # squares of small gradients underflow in float32


def few_coordinates(block: Block) -> tuple[Shape, Basis]:
    """A few random coordinates, for steps whose rows are not projected as they come."""
    s = block.shape
    shape = Shape(s.d_out, s.d_in, min(s.d_out, 4), min(s.d_in, 4))
    return shape, basis_like(random_basis(shape, seed=0, name=block.name), block.parameter)


def _cause(passes: Passes, scope: StepScope, rest: Tensor, theta: Tensor, clip: float) -> str:
    """What the step itself shows of the cause, or the likely causes, and what to do."""
    if passes.differentiable:
        return (
            "A backward pass with create_graph=True ran in this step, as for a gradient penalty. Its gradient is not "
            "a sum over layer calls, so it is not supported. Record without the penalty."
        )
    if len(set(passes.recorded) - set(passes.accumulated)):
        return (
            "torch.autograd.grad ran through the model inside this step, as for adversarial examples. Its gradients "
            "are not part of the parameters' gradients. Call it before rec.step()."
        )
    factor = _multiple(rest / clip, theta)
    if factor is not None:
        return (
            f"The difference is {factor:.3g} times the parameter itself, as from an L2 term in the loss. Remove the "
            f"term from the loss and add {factor:.3g} to weight_decay= of SGD or Adam. This is equivalent, except "
            "that clip_grad_norm_ does not clip it (AdamW's weight_decay is decoupled, and so different)."
        )
    if len(passes.recorded) > len(scope.sizes):
        return (
            f"{len(passes.recorded)} backward passes ran in this step, but it declares {len(scope.sizes)} "
            "micro-batches. Move a pass that does not belong to the update (its gradients were zeroed again) before "
            f"rec.step(), and declare each micro-batch with s.batch(ids). {CAUSES}"
        )
    return CAUSES


def _multiple(rest: Tensor, theta: Tensor) -> float | None:
    """λ > 0 where the rest is λ θ, as far as their coordinates can tell; else None."""
    factor = float(rest @ theta / theta.square().sum().clamp_min(1e-300))
    alike = bool((rest - factor * theta).norm() < ALIKE * rest.norm())
    return factor if alike and factor > 0 and len(theta) >= COORDINATES else None
