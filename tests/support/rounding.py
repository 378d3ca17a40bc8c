r"""Another processor's rounding, on this one: the last bit of most sums of products is drawn at random.

A matrix product may round differently from one processor to another, from one memory alignment to the next, and with
another number of rows in the batch. `NoisyRounding` makes each call differ by one unit of the last place, so that a
test which compares two computations bit for bit fails here before it fails on somebody else's machine:

    make test-rounding

What is exact everywhere stays as it is: sums of one or two terms, and results that are whole numbers (counts, one-hot
products). The draws come from a generator of their own, never torch's global one.
Assumes: operations run in the thread that entered the mode; background threads round as usual.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.convolution}
SUMS = {aten.sum, aten.mean, aten.linalg_vector_norm, aten.convolution_backward, aten.cumsum}


class NoisyRounding(TorchDispatchMode):
    """Every sum of products, and every long sum, comes out with a random last bit."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._draws = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation, and then its last bit."""
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func.overloadpacket not in PRODUCTS | SUMS or not _is_long(func.overloadpacket, args):
            return out
        if "out" in kwargs:
            kwargs["out"].copy_(self._noisy(kwargs["out"]))
            return out
        if isinstance(out, tuple):
            return tuple(self._noisy(x) if isinstance(x, Tensor) else x for x in out)
        return self._noisy(out)

    def _noisy(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float64) or x.device.type != "cpu" or x.layout != torch.strided:
            return x
        unit = torch.finfo(x.dtype).eps
        draw = torch.randint(-1, 2, x.shape, generator=self._draws, dtype=torch.int8)
        return torch.where(x == x.round(), x, x * (1 + unit * draw.to(x.dtype)))


def _is_long(packet: Any, args: Any) -> bool:
    """Whether more than two terms are summed: fewer have one rounding only, whatever the order."""
    first = next((x for x in args if isinstance(x, Tensor)), None)
    if first is None or packet is aten.convolution or packet is aten.convolution_backward:
        return first is not None
    if packet in SUMS:
        return first.numel() > 2
    factor: Tensor = args[1] if packet in (aten.addmm, aten.baddbmm, aten.addmv) else args[0]
    return factor.shape[-1] > 2
