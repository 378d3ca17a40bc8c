r"""How much of the gap between exact unrolling and retraining comes from kinks (ReLU, max-pooling).

Take only a share f of each removed weight and divide the change by f:

    truth(f) = (ℓ(θ_T with weights (1−f) w) − ℓ(θ_T)) / f          truth(1) is TSLOO
    gap(f)   = ‖truth(f) − unrolled‖                               over all removals and queries

Where training is smooth in the weights, the gap is of second order and shrinks with f. A kink that the run stands close
to is crossed by a small removal too, and the step of the gradient across it does not shrink. So the part of the gap that
is still there at the smallest f is the kinks' share: about f itself for a smooth net. Kinks farther away than the
smallest removal reaches count as smooth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.exact.losses import QueryLoss
from backstory.exact.reverse import reverse
from backstory.replay.tape import Progress, RecipeSource, Removal

FACTORS = (1.0, 0.1, 0.01)
NEGLIGIBLE = 1e-9  # a gap of this part of the truth is rounding


@dataclass(frozen=True)
class KinkReport:
    """Relative gaps for shrinking removals, and what they say."""

    factors: tuple[float, ...]
    gaps: tuple[float, ...]  # ‖truth(f) − unrolled‖ / ‖truth(1)‖
    kinks: float  # share of the first gap that the last factor leaves
    smooth: float  # share that disappears

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def kink_share(
    recipe: RecipeSource,
    removals: Sequence[Removal],
    query_loss: QueryLoss,
    factors: Sequence[float] = FACTORS,
    *,
    args: Mapping[str, Any] | None = None,
    cache: Path | None = None,
    vectorised: bool | None = None,
    dtype: torch.dtype | None = torch.float64,
    progress: Progress | None = None,
) -> KinkReport:
    """Retrain with the removals and with ever smaller parts of them, largest factor first."""
    chosen = tuple(sorted(factors, reverse=True))
    if len(chosen) < 2 or not 0 < chosen[-1] < chosen[0] <= 1:
        raise UsageError(f"found factors={tuple(factors)}; expected at least two numbers between 0 and 1.")
    answer = reverse(recipe, query_loss, args=args, dtype=dtype, cache=cache)
    unrolled = torch.stack([answer.sum_over(r.samples, steps=r.steps) for r in removals])  # (removals, Q)
    shrunk = [replace(r, share=f) for f in chosen for r in removals]
    found = leave_out(
        recipe, shrunk, query_loss, progress, args=args, cache=cache, vectorised=vectorised, dtype=dtype
    ).reshape(len(chosen), *unrolled.shape)
    truths = [rows / f for rows, f in zip(found, chosen, strict=True)]
    size = float(truths[0].norm())
    gaps = [float((truth - unrolled).norm()) / max(size, 1e-300) for truth in truths]
    kinks = min(1.0, gaps[-1] / gaps[0]) if gaps[0] > NEGLIGIBLE else 0.0
    return KinkReport(chosen, tuple(gaps), kinks, 1.0 - kinks)
