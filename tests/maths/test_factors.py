"""Outer products as their factors and back; anything else is refused."""

import pytest
import torch
from tests.support.oracles import assert_close

from backstory.errors import UsageError
from backstory.maths.factors import Block, factored, multiplied, parts, sizes, worth_it

BLOCKS: list[Block] = [(4, 3), 5, (2, 6)]


def products(n: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Rows written out entry by entry: outer products of the first and last block, anything in the middle."""
    g = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(n):
        u, v, w, x, y = (torch.randn(size, generator=g, dtype=dtype) for size in (4, 3, 5, 2, 6))
        entries = [u[i] * v[j] for i in range(4) for j in range(3)]
        rows.append(torch.stack([*entries, *w, *(x[i] * y[j] for i in range(2) for j in range(6))]))
    return torch.stack(rows)


def test_factors_multiply_to_the_row() -> None:
    rows = products(7)
    kept = factored(rows, BLOCKS)
    assert (sizes(BLOCKS), parts(BLOCKS)) == ([12, 5, 12], [4, 3, 5, 2, 6])
    assert kept.shape == (7, 20)
    assert_close(multiplied(kept, BLOCKS), rows, 1e-13, "Factors changed places, or u is not M v / ⟨v, v⟩.")


def test_zeros_and_single_precision() -> None:
    rows = products(3, torch.float32)
    rows[1] = 0
    rows[2, :12] *= 1e-30  # squares of such numbers are 0 in single precision
    found = multiplied(factored(rows, BLOCKS), BLOCKS)
    assert not found[1].any()
    assert_close(found[0], rows[0], 1e-6)
    assert_close(found[2, :12] * 1e30, rows[2, :12] * 1e30, 1e-5)


def test_rows_without_factors_are_left_alone() -> None:
    rows = products(2)
    assert factored(rows, [29]) is rows
    assert multiplied(rows, [12, 17]) is rows


def test_what_is_no_outer_product_is_refused() -> None:
    rows = products(3)
    rows[1, 0] += 1.0
    with pytest.raises(UsageError, match=r"4 × 3 numbers that is not the product.*factored=True"):
        factored(rows, BLOCKS)


def test_where_factors_are_smaller() -> None:
    assert [worth_it(*x) for x in ((2, 2), (1, 9), (2, 3), (64, 784))] == [False, False, True, True]
