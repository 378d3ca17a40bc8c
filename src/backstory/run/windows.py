r"""Curvature that a compressed run keeps for windows of steps, and how a step gets its share of it.

Of the steps t of a window, the mean of their curvature is kept as few orthogonal rows (`maths.shared_curvature`):

    VᵀV ≈ 1/T Σ_t H_t,      H_t ← VᵀV  for each of them

Where a step was clipped, ⟨v, ∇L_t⟩ of these rows is needed. In raw coordinates it is ⟨v, n⟩, n = Σ w g. In Adam's, ∇L_t is seen
through the smallest vector d_t that has the recorded products with the step's own rows, gradient rows among them: ⟨h, d_t⟩ = ⟨h, ∇L_t⟩.

`curvature-<from>-<to>.safetensors`:  `V`, `V/scale` encoded like rows; `d`, `d/scale` likewise, one for each clipped step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import UsageError
from ..maths import encoding as enc
from ..maths.shared_curvature import orthogonal
from ..maths.steps import Step
from ..store import RunStore

Span = tuple[int, int]  # from step, to step


class Window(NamedTuple):
    """What is kept for the steps of one window."""

    V: Tensor  # (R, p), orthogonal rows
    d: Tensor | None  # one row for each clipped step, in Adam's coordinates only


class Compressed:
    """The curvature of a compressed run while a sweep passes over it; holds one window at a time."""

    def __init__(self, store: RunStore, dtype: torch.dtype) -> None:
        self._store, self._dtype = store, dtype
        self._spans: list[Span] = [(lo, hi) for lo, hi in (store.config.get("compressed") or {}).get("windows", [])]
        self._held: tuple[Span, Window, dict[int, int]] | None = None  # and the row of `d` of each clipped step

    def fill(self, steps: Sequence[Step], first: int) -> list[Step]:
        """The steps, numbered from `first` on, with the curvature that is kept for them; as they are in other runs."""
        return [self._filled(s, t) for t, s in enumerate(steps, first)] if self._spans else list(steps)

    def _filled(self, step: Step, t: int) -> Step:
        span = next(s for s in self._spans if s[0] <= t < s[1])
        if self._held is None or self._held[0] != span:
            clipped = np.flatnonzero(self._store.steps(*span).clip < 1).tolist()
            self._held = (
                span,
                read_window(self._store, span, self._dtype),
                {span[0] + k: i for i, k in enumerate(clipped)},
            )
        _, (V, d), row = self._held
        if step.clip >= 1:
            return step._replace(V=V, dot_v=None, orthogonal=True)
        seen = step.w @ step.G if d is None else d[row[t]]
        return step._replace(V=V, dot_v=V @ seen, orthogonal=True)


def write_window(store: RunStore, span: Span, window: Window) -> None:
    """Keep the curvature of one window, in the run's encoding."""
    kept: dict[str, Tensor] = {}
    for name, rows in zip(Window._fields, window, strict=True):
        if rows is not None:
            codes, scales = enc.encode(rows, store.dims, store.config["encoding"])
            kept |= (
                {name: codes.contiguous()} if scales is None else {name: codes.contiguous(), f"{name}/scale": scales}
            )
    store.save_tensors(_name(span), kept)


def read_window(store: RunStore, span: Span, dtype: torch.dtype) -> Window:
    """The curvature of one window; its rows are made orthogonal again after their rounding."""
    kept = store.load_tensors(_name(span))
    found = {k: enc.decode(kept[k], kept.get(f"{k}/scale"), store.dims, dtype) for k in Window._fields if k in kept}
    return Window(orthogonal(found["V"]), found.get("d"))


def refuse_compressed(store: RunStore, what: str) -> None:
    """Raise where the curvature of single samples is needed and only that of windows is kept."""
    if store.config.get("compressed"):
        raise UsageError(
            f"{what} needs the curvature of single samples, and this run was compressed: it keeps that of windows of steps. "
            "Ask the run that it was made from."
        )


def _name(span: Span) -> str:
    return f"curvature-{span[0]:08d}-{span[1]:08d}"
