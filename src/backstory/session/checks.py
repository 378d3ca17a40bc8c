r"""The safety net of recording: rows must add up to the gradient that torch computed.

    Σ_z w_z g_z  =  ∇L      for each parameter, in the kept coordinates

A weight that is used outside its module's forward, a module that was compiled away, a batch dimension that is not
the first, or a stale `.grad` from before the step all break this identity, and would otherwise pass silently.
Knows nothing of files.
"""

from collections.abc import Collection, Iterable, Sequence

import torch

from ..capture.blocks import Block
from ..errors import CoverageError
from ..maths.subspace import Basis, Shape, project_dense, random_basis
from .step import StepScope

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}  # relative
HALF_TOLERANCE = 5e-2  # half precision, of the gradient itself or inside autocast


def check_sums(
    scope: StepScope,
    blocks: Sequence[Block],
    chosen: Iterable[int],
    bases: Sequence[Basis] | None,
    clip: float,
    scale: float,
    rounded: Collection[int] = (),
) -> None:
    """Raise if the recorded rows of a chosen block do not add up to its gradient, times the clipping factor.

    `rounded` are the blocks whose layers ran in half precision: their gradient is that much coarser than its type.
    """
    for number in chosen:
        block = blocks[number]
        grad = block.parameter.grad
        if grad is None:
            continue
        wide = grad.detach().to(torch.promote_types(grad.dtype, torch.float32))
        shape, basis = block.shape, bases[number] if bases is not None else None
        if basis is None:
            shape, basis = _small(block)
        expected = project_dense(wide[None], shape, basis)[0]  # (dims,)
        found, size = scope.gradients.total(number, shape, basis)
        rounding = clip / scale * size
        error = (expected - found * (clip / scale)).norm()
        tolerance = HALF_TOLERANCE if number in rounded else TOLERANCE.get(grad.dtype, HALF_TOLERANCE)
        if bool(error > tolerance * (expected.norm() + 0.1 * rounding)):
            raise CoverageError(_message(block.name, scope.number, float(error / expected.norm().clamp_min(1e-30))))


def _small(block: Block) -> tuple[Shape, Basis]:
    """A few random coordinates, for steps whose own basis is not known yet."""
    s = block.shape
    shape = Shape(s.d_out, s.d_in, min(s.d_out, 4), min(s.d_in, 4))
    basis = random_basis(shape, seed=0, name=block.name)
    like = block.parameter
    wide = torch.promote_types(like.dtype, torch.float32)
    return shape, Basis(*(None if x is None else x.to(like.device, wide) for x in basis))


def _message(name: str, step: int, error: float) -> str:
    return (
        f"the recorded rows of {name!r} do not add up to its gradient in step {step} (off by {error:.1%}). Likely "
        "causes: the forward pass ran outside of rec.step(); gradients from before the step were not zeroed; the weight is used outside its module's forward (nn.MultiheadAttention, functional calls); an "
        "in-place operation such as nn.ReLU(inplace=True) follows a Linear layer on sequences; the module was "
        "compiled or replaced; something was added to .grad after "
        "backward; a custom rule is wrong. Leave the layer out with layers=['!name'], or mend the cause."
    )
