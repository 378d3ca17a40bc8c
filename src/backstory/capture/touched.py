"""Has anything but the recorded optimizer changed the weights? Told from a few numbers, taken after each of its updates and before the next.

The numbers are norms over at most 64 entries of each parameter, spread over it, so that they cost little. A change of entries that are not
among these is not seen; one of a whole layer is. Weights that are exchanged and put back (an average, for an evaluation) are no change.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ENTRIES = 64  # of a parameter


class Weights:
    """A few numbers of all parameters."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = [p for p in parameters if p.numel()]
        self._places: list[int] = []
        self._views: list[Tensor] = []
        self._left: Tensor | None = None  # by the last update
        self.following = True
        self.changes = 0  # steps that did not start from what the one before had left

    def leave(self) -> None:
        """Right after an update."""
        self._left = self._numbers() if self.following else None

    def start(self) -> None:
        """Right before the next one."""
        if self._left is not None and not torch.equal(self._left, self._numbers()):
            self.changes += 1
        self._left = None

    @torch.no_grad()
    def _numbers(self) -> Tensor:
        places = [p.data_ptr() for p in self._parameters]
        if places != self._places:
            self._places, self._views = places, list(map(_spread, self._parameters))
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for view in self._views:
            by_kind.setdefault((view.dtype, view.device), []).append(view)
        norms = [torch.stack(torch._foreach_norm(views)).double().cpu() for views in by_kind.values()]
        return torch.cat(norms) if norms else torch.zeros(0)


def _spread(p: Tensor) -> Tensor:
    """At most 64 entries of a parameter, where it lies."""
    flat = p.detach()
    if not flat.is_contiguous():
        flat = flat.mT if flat.dim() > 1 and flat.mT.is_contiguous() else flat[tuple(slice(0, 4) for _ in flat.shape)]
    if not flat.is_contiguous():
        return flat
    every = -(-flat.numel() // ENTRIES)
    return flat.reshape(-1)[::every]
