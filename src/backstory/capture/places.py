r"""Where the batch is in the tensors of each layer call, found by a trial: the model is called with one more sample.

The new sample is a copy of the first. A tensor (…, B·n, …) that holds the batch then is (…, (B+1)·n, …): its first B samples are as
before, and its last one is like its first. One that all samples share is as it was. Anything else mixes samples or gathers some
of their positions, as the experts of a mixture do. Shapes alone would not tell: batch and sequence may be of the same length.

The trial runs without gradients, in eval mode (no dropout), on a copy of the buffers; random states are put back.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .model_state import in_mode
from .nested import Nested, nested, tensors_in
from .randomness import own_randomness

NEAR = {torch.float64: 1e-5, torch.float32: 1e-3}  # of the largest entry
NEAR_HALF = 1e-1


class Scattered:
    """The place of a batch that a tensor does not hold as one entry, or as several in a row, for each sample."""


Place = int | None | type[Scattered]  # a dimension; None: the tensor is the same for all samples


class Places(NamedTuple):
    """Those of one call's tensors."""

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    floating: tuple[bool, ...]  # of the outputs


class _Seen(NamedTuple):
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def find_places(
    model: nn.Module, inputs: Nested, size: int, watched: Sequence[nn.Module], prefer: int | None
) -> dict[nn.Module, list[Places]] | None:
    """Of each watched module's calls, by calling `model` once more; None where the trial is impossible or tells nothing."""
    found = []
    for dim in (0, 1) if prefer is None else (prefer,):
        if any(_holds(x, dim, size) for x in inputs.tensors) and (places := _tried(model, inputs, size, watched, dim)):
            found.append(places)
    return found[0] if len(found) == 1 else None


def place_of(before: Tensor, after: Tensor, size: int) -> Place:
    """Where the batch is in a tensor that was `before` with `size` samples, and is `after` with one more, like the first."""
    if before.shape == after.shape:
        return None if _near(before, after) else Scattered
    if before.dim() != after.dim():
        return Scattered
    changed = [d for d in range(before.dim()) if before.shape[d] != after.shape[d]]
    dim = changed[0]
    n, rest = divmod(before.shape[dim], size)
    if len(changed) > 1 or rest or after.shape[dim] != (size + 1) * n:
        return Scattered
    as_before = _near(before, after.narrow(dim, 0, size * n))
    return dim if as_before and _near(before.narrow(dim, 0, n), after.narrow(dim, size * n, n)) else Scattered


def _tried(
    model: nn.Module, inputs: Nested, size: int, watched: Sequence[nn.Module], dim: int
) -> dict[nn.Module, list[Places]] | None:
    """The places where the batch is dimension `dim` of what `model` is given; None where it is not."""
    more = tuple(torch.cat([x, x.narrow(dim, 0, 1)], dim) if _holds(x, dim, size) else x for x in inputs.tensors)
    try:
        before, after = (_calls(model, inputs.filled(x), watched) for x in (inputs.tensors, more))
    except Exception:  # whatever a model has against another batch: then it is not known
        return None
    found = {m: [_places(*x, size) for x in zip(calls, after.get(m, ()), strict=False)] for m, calls in before.items()}
    found = _without_gathered(found, before, model, inputs, size, dim)
    shapes = [x.dim() for x in before[model][0].outputs]
    outputs = zip(found[model][0].outputs, found[model][0].floating, shapes, strict=True)
    if whole := [p for p, floating, dims in outputs if floating and dims]:  # a loss of the whole batch does not tell
        return found if any(isinstance(p, int) for p in whole) else None
    inner = [p for m, calls in found.items() if m is not model for places in calls for p in places.outputs]
    return found if sum(isinstance(p, int) for p in inner) > sum(p is Scattered for p in inner) else None


def _without_gathered(
    found: dict[nn.Module, list[Places]],
    before: Mapping[nn.Module, list[_Seen]],
    model: nn.Module,
    inputs: Nested,
    size: int,
    dim: int,
) -> dict[nn.Module, list[Places]]:
    """Positions that were gathered may be as many for each sample by chance; not so once all positions are alike, as one or as another.

    Where neither can be tried, they count as gathered: rows of the wrong samples would pass every later check.
    """
    flat = [m for m, calls in before.items() if any(_may_gather(*x, size) for x in zip(calls, found[m], strict=False))]
    tried = 0
    for place in (0, -1) if flat else ():
        alike = tuple(_alike(x, place) if _holds(x, dim, size) else x for x in inputs.tensors)
        try:
            calls = _calls(model, inputs.filled(alike), flat)
        except Exception:  # lengths that the entries tell, for example
            continue
        tried += 1
        for m in flat:
            shapes = [[x.shape for x in (*call.inputs, *call.outputs)] for call in calls.get(m, ())]
            if shapes != [[x.shape for x in (*call.inputs, *call.outputs)] for call in before[m]]:
                found[m] = _scattered(found[m])
    return found if tried else {**found, **{m: _scattered(found[m]) for m in flat}}


def _scattered(places: Sequence[Places]) -> list[Places]:
    return [p._replace(inputs=(Scattered,) * len(p.inputs)) for p in places]


def _may_gather(seen: _Seen, places: Places, size: int) -> bool:
    pairs = zip(seen.inputs, places.inputs, strict=True)
    return any(isinstance(p, int) and x.is_floating_point() and (x.shape[p] > size or x.dim() == 2) for x, p in pairs)


def _alike(x: Tensor, place: int) -> Tensor:
    """Every entry like one of the positions; features stay apart, and masks stay as they are."""
    if not x.is_floating_point() and not bool((x > 1).any()):
        return x
    one = x.flatten(0, -2)[place] if x.is_floating_point() and x.dim() > 2 else x.flatten()[place]
    return one.expand_as(x).clone() if x.numel() else x


def _places(before: _Seen, after: _Seen, size: int) -> Places:
    sides = zip((before.inputs, before.outputs), (after.inputs, after.outputs), strict=True)
    ins, outs = (
        tuple(place_of(x, y, size) for x, y in zip(a, b, strict=True)) if len(a) == len(b) else (Scattered,) * len(a)
        for a, b in sides
    )
    return Places(ins, outs, tuple(x.is_floating_point() for x in before.outputs))


def _calls(model: nn.Module, given: Any, watched: Sequence[nn.Module]) -> dict[nn.Module, list[_Seen]]:
    """What goes in and out of the watched modules, and of the model, in one call."""
    calls = defaultdict[nn.Module, list[_Seen]](list)

    def see(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        calls[module].append(_Seen(*(tuple(x.clone() for x in tensors_in(y)) for y in ((args, kwargs), out))))

    handles = [m.register_forward_hook(see, with_kwargs=True) for m in {*watched, model}]
    try:
        with own_randomness(), _own_buffers(model), in_mode(model), torch.no_grad(), _plain_attention():
            model(*given[0], **given[1])
    finally:
        for handle in handles:
            handle.remove()
    return calls


@contextmanager
def _own_buffers(model: nn.Module) -> Iterator[None]:
    buffers = {b: b.clone() for b in model.buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for b, value in buffers.items():
                if not torch.equal(b, value):
                    b.copy_(value)


@contextmanager
def _plain_attention() -> Iterator[None]:
    """In eval mode, torch's encoder layers would not call the layers inside."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def _holds(x: Tensor, dim: int, size: int) -> bool:
    return x.dim() > dim and x.shape[dim] == size


def _near(x: Tensor, y: Tensor) -> bool:
    if not x.is_floating_point():
        return torch.equal(x, y)
    large = torch.where(x.isfinite(), x, torch.zeros_like(x)).abs().amax().item() if x.numel() else 0.0
    return torch.allclose(x, y, rtol=0.0, atol=NEAR.get(x.dtype, NEAR_HALF) * large, equal_nan=True)


def tree(args: Any, kwargs: Any) -> Nested:
    """What a module is called with."""
    return nested((args, kwargs))
