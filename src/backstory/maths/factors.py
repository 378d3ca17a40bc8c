r"""Rows that are outer products, kept as their two factors.

A sample that passes a layer once, at one position, has the gradient δ aᵀ: m n numbers in a row, and m + n in its factors. They are
found again from the row itself, seen as a matrix M (m × n):

    v = the row of M with the largest entry, over that entry,      u = M v / ⟨v, v⟩,      M = u vᵀ up to rounding

A block is the number of its entries, or a pair (m, n) where its factors are kept.
Shapes:  N rows, p entries a row in all.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError

Block = int | tuple[int, int]
TOLERANCE = 1e-4  # of a matrix's norm, that may be missing from u vᵀ


def sizes(blocks: Sequence[Block]) -> list[int]:
    """Entries of each block in a row."""
    return [b if isinstance(b, int) else b[0] * b[1] for b in blocks]


def parts(blocks: Sequence[Block]) -> list[int]:
    """Numbers that are kept of each block, factor by factor."""
    return [n for b in blocks for n in ([b] if isinstance(b, int) else b)]


def worth_it(m: int, n: int) -> bool:
    """Whether two factors are smaller than their product."""
    return m + n < m * n


def factored(rows: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Rows (N, p) -> (N, Σ parts); raises where a block is no outer product."""
    if all(isinstance(b, int) for b in blocks):
        return rows
    cut = rows.split(sizes(blocks), 1)
    return torch.cat([x for i, block in enumerate(blocks) for x in _factors(cut[i], block)], 1)


def _factors(rows: Tensor, block: Block) -> Sequence[Tensor]:
    if isinstance(block, int):
        return [rows]
    M = rows.reshape(len(rows), *block)
    largest = M.abs().amax(2).max(1)  # of each row of M; its values are also the scales of v
    v = M[torch.arange(len(M)), largest.indices] / _or_one(largest.values)[:, None]  # (N, n), at most 1
    u = torch.bmm(M, v[:, :, None])[:, :, 0] / _or_one(v.square().sum(1))[:, None]  # (N, m)
    missing = (M - u[:, :, None] * v[:, None]).flatten(1).norm(dim=1)
    if bool((missing > TOLERANCE * rows.norm(dim=1)).any()):
        raise UsageError(
            f"found a row of {block[0]} × {block[1]} numbers that is not the product of two factors; expected samples that pass each "
            "layer once, at one position. Record without factored=True."
        )
    return u, v


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)


def multiplied(kept: Tensor, blocks: Sequence[Block]) -> Tensor:
    """The inverse of `factored`: (N, Σ parts) -> (N, p)."""
    if all(isinstance(b, int) for b in blocks):
        return kept
    cut, out = iter(kept.split(parts(blocks), 1)), []
    for block in blocks:
        first = next(cut)
        out.append(first if isinstance(block, int) else (first[:, :, None] * next(cut)[:, None]).flatten(1))
    return torch.cat(out, 1)
