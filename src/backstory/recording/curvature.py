r"""Curvature samples of a step while it is being recorded: extra backward passes from the model's outputs.

Each pass starts from a seed (`maths.curvature`) and gives one row h for every sample, with

    H_t ≈ Σ_z κ_z Σ_r h_zr h_zrᵀ,      κ = w c / k  (k draws)   or   w c  (exact),   c = 1 or 1/(positions of z)

Where rows are taken apart by groups of positions, each pass gives one row for each group, with the same κ. The seeds carry no weight and no loss scale, so the rows are raw from the start.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..capture.hooks import Sink
from ..capture.modules import Block
from ..errors import NumericalError, UnsupportedError, UsageError
from ..maths.adam import Scale
from ..maths.curvature import KINDS, check, exact_seeds, n_exact, positions, sampled_seed
from ..maths.encoding import all_finite
from ..maths.gauss_newton import signed_seeds
from ..maths.projection import Basis
from .contributions import Ahead, Gathered, Parts
from .settings import Curvature
from .step import StepScope

Pass = Callable[[Tensor, Tensor, Sink], None]  # outputs, seed, sink


class CurvatureRows:
    """R curvature rows for each sample of one step."""

    def __init__(
        self,
        form: Curvature,
        seed: int,
        blocks: Sequence[Block],
        bases: Sequence[Basis] | None,
        extra_pass: Pass,
        ahead: Ahead | None = None,
    ) -> None:
        self.form, self._seed, self._pass = form, seed, extra_pass
        self.passes = [Gathered(blocks, bases, form.position_groups, ahead=ahead) for _ in range(form.passes)]
        self._scales: list[Tensor] = []  # c / k of each micro-batch's samples
        self.seeds: list[list[Tensor]] = []  # of each micro-batch, where their gradients are taken out of the rows

    def take(self, scope: StepScope, outputs: Tensor, kind: str, mask: Tensor | None, reduction: str | None) -> None:
        """All passes of the micro-batch under way."""
        if kind not in KINDS:
            raise UnsupportedError(
                f"curvature for outputs of kind={kind!r} is not supported. Record with curvature='empirical', or use "
                f"a loss of kind {', '.join(map(repr, KINDS))}."
            )
        if len(self._scales) != len(scope.sizes) - 1:
            raise UsageError("s.outputs() must be called exactly once per s.batch(), after its forward pass.")
        check(outputs, kind, mask)
        inner = _inner_scale(scope, outputs, kind, mask, reduction)
        seeds = (
            list(self._seeds(scope, outputs, kind, mask)) if self.form.own else self._seeds(scope, outputs, kind, mask)
        )
        if isinstance(seeds, list):
            self.seeds.append(seeds)
        for r, seed in enumerate(seeds):
            self._pass(outputs, seed, self.passes[r].add)
        self._scales.append(inner / self.form.passes if self.form.kind == "sampled" else inner)

    def is_complete(self, scope: StepScope) -> bool:
        """Whether every micro-batch has its rows."""
        return len(self._scales) == len(scope.sizes)

    def check_complete(self, scope: StepScope) -> None:
        """Before the optimizer moves: has every micro-batch its rows?"""
        if not self.is_complete(scope):
            raise UsageError(
                f"curvature={self.form.kind!r} needs the model's outputs, but step {scope.number} has them for "
                f"{len(self._scales)} of {len(scope.sizes)} micro-batches. Run the forward pass inside `with "
                f"step.outputs_of(model, kind)`, or call step.outputs(logits, kind) before backward(); kind: {', '.join(KINDS)}."
            )

    def kappa(self, weight: Tensor) -> Tensor:
        """κ of each row, (B, R), float64."""
        return (weight * torch.cat(self._scales))[:, None].expand(-1, self.form.rows)

    def settle(self, bases: Sequence[Basis], sides: Sequence[Basis], duals: Sequence[Tensor | None] | None) -> None:
        """Project what was kept of all passes."""
        for one in self.passes:
            one.settle(bases, sides, duals)

    def settled_dots(self, sizes: Sequence[int]) -> Tensor:
        """⟨h, ∇L⟩ of all rows as `settle` has found them, (B, R)."""
        return torch.cat([one.settled_dots(sizes) for one in self.passes], 1)

    def dots(self, wholes: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor:
        """⟨h, ∇L⟩ of all rows, exactly, (B, R)."""
        return torch.cat([one.dots(wholes, sizes) for one in self.passes], 1)

    def rows(self, scope: StepScope) -> Tensor:
        """(B, R, Σ dims), on the CPU."""
        rows = torch.cat([x.rows(scope.sizes) for x in self.passes], 1)
        if not all_finite(rows):
            bad = int((~rows.flatten(1).isfinite()).any(1).nonzero()[0])
            raise NumericalError(
                f"a curvature sample of sample {scope.ids[bad]!r} in step {scope.number} is NaN or Inf. The step was "
                "not recorded. Check that sample's input and outputs."
            )
        return rows

    def take_parts(self, scales: Sequence[Scale] | None) -> Parts:
        """Merged contributions (row, slot, block) of a warm-up step, on the CPU, which are let go."""
        parts = enumerate(x.take_parts(scales) for x in self.passes)
        return {
            (r * self.form.position_groups + k, slot, b): part for r, x in parts for (k, slot, b), part in x.items()
        }

    def _seeds(self, scope: StepScope, outputs: Tensor, kind: str, mask: Tensor | None) -> Iterator[Tensor]:
        if self.form.own:
            yield from signed_seeds(outputs, kind, self.form.passes, self._generator(scope, "signs"))
            return
        if self.form.kind == "sampled":
            for draw in range(self.form.passes):
                yield sampled_seed(outputs, kind, self._generator(scope, str(draw)), mask)
            return
        if (entries := n_exact(outputs)) != self.form.passes:
            raise UsageError(
                f"the model has {entries} output entries per sample, but curvature='exact:{self.form.passes}' "
                f"declares {self.form.passes}. Record with curvature='exact:{entries}'."
            )
        yield from exact_seeds(outputs, kind, mask)

    def _generator(self, scope: StepScope, what: str) -> torch.Generator:
        """Of the micro-batch under way, for one purpose."""
        name = f"{self._seed}/curvature/{scope.number}/{len(scope.sizes)}/{what}"
        return torch.Generator().manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1)


def _inner_scale(scope: StepScope, outputs: Tensor, kind: str, mask: Tensor | None, reduction: str | None) -> Tensor:
    """c of each sample, (B,): 1 where its loss is a sum over positions, 1/positions where it is their mean."""
    count = positions(outputs, kind, mask)
    if reduction is None:
        reduction = "sum" if scope.reduction == "token-mean" or bool((count <= 1).all()) else None
    if reduction not in ("sum", "mean"):
        raise UsageError(
            f"reduction must be 'sum' or 'mean' when a sample has several loss terms (here {int(count.max())}), got "
            f"{reduction!r}. Pass s.outputs(…, reduction='mean') if its loss is their mean, else 'sum'."
        )
    return torch.ones_like(count) if reduction == "sum" else 1.0 / count.clamp_min(1)
