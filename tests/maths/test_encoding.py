"""Round trips, with the largest error that each encoding may make; outer products as their factors and back."""

import pytest
import torch
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.errors import UsageError
from backstory.maths.encoding import (
    DTYPES,
    Block,
    check,
    decode,
    encode,
    is_coarse,
    looseness,
    multiply_factors,
    parts,
    row_bytes,
    sizes,
    split_factors,
    worth_it,
)

DIMS = (4, 1, 7)


def rows(dtype: torch.dtype = torch.float64) -> Tensor:
    """Blocks of very different size; one block of zeros."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(5, sum(DIMS), generator=g, dtype=torch.float64)
    x[:, :4] *= 1e-12
    x[:, 5:] *= 1e6
    x[2, :4] = 0.0
    return x.to(dtype)


def round_trip(x: Tensor, name: str) -> Tensor:
    return decode(*encode(x, DIMS, name), DIMS, torch.float64)


def block_maxima(x: Tensor) -> Tensor:
    """(N, p): at each entry the largest size in its block of its row."""
    return torch.cat([b.abs().amax(1, keepdim=True).expand_as(b) for b in x.split(list(DIMS), dim=1)], dim=1)


@pytest.mark.parametrize(("name", "step"), [("float16", 2.0**-10), ("int8", 1 / 127)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_error_is_half_a_step_of_the_blocks_largest(name: str, step: float, dtype: torch.dtype) -> None:
    x = rows(dtype)
    codes, scales = encode(x, DIMS, name)
    assert codes.dtype is DTYPES[name]
    assert scales is not None
    assert scales.dtype is torch.float32
    assert scales.shape == (5, 3)
    bound = block_maxima(x).double() * (step / 2 + 2e-7)  # the scale itself is a float32
    worst = ((round_trip(x, name) - x).abs() / bound.clamp(min=1e-300)).max().item()
    assert worst <= 1, (
        f"{worst:.1f} x the allowed error. 2 would mean truncation instead of rounding; a large number a scale "
        "shared by blocks or rows of different size."
    )


@pytest.mark.parametrize("name", DTYPES)
def test_zeros_stay_zeros_and_signs_stay_signs(name: str) -> None:
    x = rows()
    back = round_trip(x, name)
    assert not back[2, :4].any()
    largest = x.abs() == block_maxima(x)
    assert torch.equal(back[largest].sign(), x[largest].sign())
    assert not round_trip(torch.zeros(2, sum(DIMS)), name).any()


@pytest.mark.parametrize("name", DTYPES)
def test_tiny_values_survive(name: str) -> None:
    x = torch.full((2, sum(DIMS)), 1e-30, dtype=torch.float64)
    assert (round_trip(x, name) / 1e-30 - 1).abs().max().item() < 1e-6


@pytest.mark.parametrize("name", DTYPES)
def test_a_stored_row_is_as_near_as_is_promised(name: str) -> None:
    x = torch.randn(50, sum(DIMS), generator=torch.Generator().manual_seed(0)).double()
    error = (round_trip(x, name) - x).norm(dim=1) / x.norm(dim=1)
    assert float(error.max()) < looseness(name) <= 0.5
    assert is_coarse(name) == (not DTYPES[name].is_floating_point)


def test_float64_and_float32_are_kept_as_they_are() -> None:
    codes, scales = encode(rows(), DIMS, "float64")
    assert scales is None
    assert torch.equal(codes, rows())
    assert torch.equal(round_trip(rows(), "float64"), rows())
    single = rows(torch.float32)
    assert torch.equal(round_trip(single, "float32"), single.double())


def test_bytes_of_a_row() -> None:
    """12 numbers, and a float32 for each of three blocks where they have scales."""
    expected = {"float16": 12 * 2 + 12, "int8": 12 + 12, "float32": 12 * 4, "float64": 12 * 8}
    assert {name: row_bytes(DIMS, name) for name in DTYPES} == expected


def test_decode_leaves_the_codes_alone() -> None:
    codes, scales = encode(rows(), DIMS, "float16")
    before = codes.clone()
    decode(codes, scales, DIMS, torch.float16)
    assert torch.equal(codes, before), "decoding into the codes' own type must not write into them"


def test_no_rows_and_empty_blocks() -> None:
    codes, scales = encode(torch.zeros(0, sum(DIMS)), DIMS, "int8")
    assert codes.shape == (0, sum(DIMS))
    assert scales is not None
    assert scales.shape == (0, 3)
    x = torch.ones(2, 3)
    assert torch.equal(decode(*encode(x, (0, 3), "float16"), (0, 3), torch.float32), x)


def test_an_unknown_encoding_is_refused_with_the_known_ones() -> None:
    assert check("int8") == "int8"
    with pytest.raises(UsageError, match=r"one of 'float16', 'int8', 'float32', 'float64', got 'float'"):
        check("float")


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
    kept = split_factors(rows, BLOCKS)
    assert (sizes(BLOCKS), parts(BLOCKS)) == ([12, 5, 12], [4, 3, 5, 2, 6])
    assert kept.shape == (7, 20)
    assert_close(multiply_factors(kept, BLOCKS), rows, 1e-13, "Factors changed places, or u is not M v / ⟨v, v⟩.")


def test_zeros_and_single_precision() -> None:
    rows = products(3, torch.float32)
    rows[1] = 0
    rows[2, :12] *= 1e-30  # squares of such numbers are 0 in single precision
    rows[0, 17:] *= 1e-42  # and these have hardly a digit left
    actual = multiply_factors(split_factors(rows, BLOCKS), BLOCKS)
    assert not actual[1].any()
    assert_close(actual[0, :17], rows[0, :17], 1e-6)
    assert_close(actual[2, :12] * 1e30, rows[2, :12] * 1e30, 1e-5)


def test_rows_without_factors_are_left_alone() -> None:
    rows = products(2)
    assert split_factors(rows, [29]) is rows
    assert multiply_factors(rows, [12, 17]) is rows


def test_what_is_no_outer_product_is_refused() -> None:
    rows = products(3)
    rows[1, 0] += 1.0
    with pytest.raises(UsageError, match=r"4 × 3 is not an outer product.*projection='learned'"):
        split_factors(rows, BLOCKS)


def test_where_factors_are_smaller() -> None:
    assert [worth_it(*x) for x in ((2, 2), (1, 9), (2, 3), (64, 784))] == [False, False, True, True]
