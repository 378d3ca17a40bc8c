"""What removing chosen samples from all their occurrences would do: the plain sum, and the sum corrected for the
sample's own curvature, side by side.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..capture.precision import own_precision
from ..errors import UsageError
from ..maths.steps import Contraction
from ..maths.tangent import Tangent
from ..store import RunStore
from .embed import Progress
from .sweep import forward


@dataclass(frozen=True)
class RemovalEffect:
    """Influence of removing each chosen sample everywhere, (Q, M); positive: the sample helped."""

    samples: tuple[int | str, ...]
    plain: Tensor  # the sum over its occurrences, each taken alone
    corrected: Tensor  # with the sample's own curvature missing at its later occurrences


@own_precision()
def corrected(
    store: RunStore,
    queries: Tensor,
    at: int,
    samples: Sequence[str],
    *,
    contraction: Contraction,
    progress: Progress | None,
) -> Tensor:
    """⟨v, x⟩ for the displacements x of the tracked samples, (Q, M)."""
    number = {name: i for i, name in enumerate(samples)}
    if len(number) < len(samples):
        raise UsageError("samples must be unique: one is listed twice.")
    tracked = Tangent(len(samples), store.width, dtype=queries.dtype, contraction=contraction)
    seen: set[int] = set()
    for chunk in forward(store, at, dtype=queries.dtype):
        assert chunk.block.samples is not None
        lo = 0
        for step in chunk.steps:
            ids = chunk.block.samples[lo : lo + len(step.w)]
            rows = [(number[x], i) for i, x in enumerate(ids) if x in number]
            tracked.advance(step, rows)
            seen.update(tracked for tracked, _ in rows)
            lo += len(step.w)
        if progress is not None:
            progress(chunk.first_step + len(chunk.steps), at)
    if missing := [x for x in samples if number[x] not in seen]:
        raise UsageError(
            f"{len(missing)} of the samples, such as {missing[0]!r}, were never used before step {at}. Leave them out."
        )
    return (queries @ tracked.x.T).to(torch.float64)
