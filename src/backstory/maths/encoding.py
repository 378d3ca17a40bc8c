r"""How rows of numbers are compressed on disk.

A row is cut into blocks (one per parameter). For `float16` and `int8` each block b of each row is
divided by a scale s_b, so that its largest entry is 1 (float16) or 127 (int8):

    code = round(x / s_b),      x ≈ code · s_b,      s_b = max|x_b|  or  max|x_b| / 127

A float16 without a scale would underflow (gradients of 1e-8 are common). `float32` and `float64`
are kept as they are, with no scale.

A sample that passes a layer once, at one position, has the gradient δ aᵀ: m n numbers in a row, and m + n in its two factors. They
can be had from the row itself, read as a matrix M (m × n):

    v = the row of M with the largest entry, over that entry,      u = M v / ⟨v, v⟩,      M = u vᵀ up to rounding

A block is the number of its entries, or a pair (m, n) where its factors are kept.
Shapes:  N rows, p entries a row in all, L blocks.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import UsageError

DTYPES: dict[str, torch.dtype] = {
    "float16": torch.float16,
    "int8": torch.int8,
    "float32": torch.float32,
    "float64": torch.float64,
}
AT_ONCE = 256  # rows that are encoded at a time: they stay in a processor's cache
LARGEST = {"float16": 1.0, "int8": 127.0}  # code of a block, where each has a scale
Block = int | tuple[int, int]
TOLERANCE = 3e-3  # of a matrix's norm, that may be missing from u vᵀ: its square is beyond what rounding takes


def check(name: str) -> str:
    """`name` if it is a known encoding, else an error that lists the known ones."""
    if name not in DTYPES:
        raise UsageError(f"encoding must be one of {', '.join(map(repr, DTYPES))}, got {name!r}.")
    return name


def is_coarse(name: str) -> bool:
    """Whether codes are whole numbers: one scale then holds few orders of magnitude."""
    return LARGEST.get(name, 1.0) > 1


def looseness(name: str) -> float:
    """How far a stored row may be from the same row computed again, as a part of its length."""
    return min(0.5, 12.7 / LARGEST[name]) if is_coarse(name) else 1e-2


def all_finite(x: Tensor) -> bool:
    """Whether no number is NaN or Inf: their sum tells, in a tenth of the time, unless it overflows itself."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def encode(rows: Tensor, dims: Sequence[int], name: str) -> tuple[Tensor, Tensor | None]:
    """`rows` (N, p) as `(codes (N, p), scales (N, L) or None)`; `dims` are the sizes of the L blocks."""
    if name not in LARGEST:
        return rows.to(DTYPES[name]), None
    codes = torch.empty(rows.shape, dtype=DTYPES[name], device=rows.device)  # (N, p)
    scales = rows.new_empty(len(rows), len(dims))  # (N, L)
    cut = list(dims)
    for block, code, scale in zip(rows.split(cut, 1), codes.split(cut, 1), scales.unbind(1), strict=True):
        scale.copy_(_largest(block) / LARGEST[name])
        shrunk = block / _or_one(scale)[:, None]
        code.copy_(shrunk.round_() if is_coarse(name) else shrunk)
    return codes, scales.to(torch.float32)


def decode(
    codes: Tensor, scales: Tensor | None, dims: Sequence[int], dtype: torch.dtype, *, out: Tensor | None = None
) -> Tensor:
    """The inverse of `encode`, up to rounding: `(N, p)` in `dtype`, written into `out` where that is given."""
    if scales is None:
        return codes.to(dtype) if out is None else out.copy_(codes)
    rows = codes.to(dtype, copy=True) if out is None else out.copy_(codes)
    for block, scale in zip(rows.split(list(dims), dim=1), scales.to(dtype).unbind(1), strict=True):
        block *= scale[:, None]
    return rows


def row_bytes(parts: Sequence[int], name: str) -> int:
    """Bytes of one encoded row whose blocks have so many numbers, scales included."""
    return sum(parts) * DTYPES[name].itemsize + (4 * len(parts) if name in LARGEST else 0)


def _largest(block: Tensor) -> Tensor:
    return block.abs().amax(dim=1) if block.shape[1] else block.new_zeros(block.shape[0])


def sizes(blocks: Sequence[Block]) -> list[int]:
    """Entries of each block in a row."""
    return [b if isinstance(b, int) else b[0] * b[1] for b in blocks]


def parts(blocks: Sequence[Block]) -> list[int]:
    """Numbers that are kept of each block, factor by factor."""
    return [n for b in blocks for n in ([b] if isinstance(b, int) else b)]


def worth_it(m: int, n: int) -> bool:
    """Whether two factors are smaller than their product."""
    return m + n < m * n


def split_factors(rows: Tensor, blocks: Sequence[Block]) -> Tensor:
    """Rows (N, p) -> (N, Σ parts); raises where a block is no outer product."""
    if all(isinstance(b, int) for b in blocks):
        return rows
    cut = rows.split(sizes(blocks), 1)
    return torch.cat([x for i, block in enumerate(blocks) for x in _factors(cut[i], block)], 1)


def _factors(rows: Tensor, block: Block) -> Sequence[Tensor]:
    if isinstance(block, int):
        return [rows]
    M = rows.reshape(len(rows), *block)
    largest = torch.maximum(M.amax(2), -M.amin(2)).max(1)  # of each row of M; its values are also the scales of v
    v = M[torch.arange(len(M)), largest.indices] / _or_one(largest.values)[:, None]  # (N, n), at most 1
    u = torch.bmm(M, v[:, :, None])[:, :, 0] / _or_one(v.square().sum(1))[:, None]  # (N, m)
    # in two stages: one long sum loses digits
    whole = torch.linalg.vector_norm(torch.linalg.vector_norm(M, dim=2), dim=1)
    # ‖u vᵀ‖, and ‖M − u vᵀ‖² = ‖M‖² − ‖u vᵀ‖²
    product = torch.linalg.vector_norm(u, dim=1) * torch.linalg.vector_norm(v, dim=1)
    smallest = torch.finfo(rows.dtype).tiny * rows.shape[1]  # numbers below `tiny` have few digits
    if bool((whole * (1 - TOLERANCE**2 / 2) > product + smallest).any()):
        raise UsageError(
            f"a per-sample gradient of shape {block[0]} × {block[1]} is not an outer product, so it cannot be stored "
            "as two factors. This happens when a sample passes the layer more than once or at several positions. "
            "Record with projection='learned', which stores gradients in full."
        )
    return u, v


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 1.0)


def multiply_factors(factors: Tensor, blocks: Sequence[Block]) -> Tensor:
    """The inverse of `split_factors`: (N, Σ parts) -> (N, p)."""
    if all(isinstance(b, int) for b in blocks):
        return factors
    cut, out = iter(factors.split(parts(blocks), 1)), []
    for block in blocks:
        first = next(cut)
        out.append(first if isinstance(block, int) else (first[:, :, None] * next(cut)[:, None]).flatten(1))
    return torch.cat(out, 1)
