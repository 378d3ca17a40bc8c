"""The leading directions of many rows, against numpy's decompositions of all of them; sums with signs, and smallest solutions."""

import numpy as np
import pytest
import torch
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.shared_curvature import leading, signed_sums, smallest

N, WIDTH = 900, 150


def decaying(
    n: int = N, p: int = WIDTH, power: float = 0.5, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Rows whose k-th singular value is about k^−power, in no particular coordinates."""
    g = torch.Generator().manual_seed(seed)
    left, right = (torch.linalg.qr(torch.randn(m, p, generator=g, dtype=torch.float64)).Q for m in (n, p))
    out: Tensor = (left * torch.arange(1, p + 1) ** -power) @ right.T
    return out.to(dtype)


def leading_of(rows: Tensor, most: int, *sizes: int) -> Tensor:
    """In pieces of these sizes, and the rest."""
    pieces = rows.split([*sizes, len(rows) - sum(sizes)])
    return leading(pieces, [len(piece) for piece in pieces], most)


def best(rows: Tensor, most: int) -> np.ndarray:
    """The `most` leading right singular vectors of numpy, times their singular values."""
    _, values, Vt = np.linalg.svd(rows.double().numpy(), full_matrices=False)
    return np.asarray(values[:most, None] * Vt[:most])


@pytest.mark.parametrize(("n", "most"), [(1, 4), (6, 4), (10, 4), (19, 8), (20, 200)])
def test_of_few_rows_they_are_exact(n: int, most: int) -> None:
    rows = decaying(150, 60)[torch.arange(n) * 7] * 3
    V, expected = leading_of(rows, most), best(rows, most)
    assert V.shape == expected.shape
    assert_close(V.T @ V, torch.from_numpy(expected.T @ expected), 1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(("power", "share"), [(0.5, 0.93), (1.0, 0.98), (2.0, 0.98)], ids=["slow", "1/k²", "fast"])
def test_of_many_rows_they_hold_nearly_what_can_be_held(power: float, share: float, dtype: torch.dtype) -> None:
    for seed in range(3):
        rows = decaying(power=power, seed=seed, dtype=dtype)
        V = leading_of(rows, 40)
        assert V.dtype == dtype
        assert len(V) == 40 or (dtype == torch.float32 and power == 2), "what float32 rounds away is left out"
        kept, most = float(V.double().square().sum()), float(np.square(best(rows, 40)).sum())
        assert share * most <= kept <= most * (1 + 1e-5)
        H = rows.double().T @ rows.double()
        left = torch.linalg.eigvalsh(H - V.double().T @ V.double())
        assert left.min() > -1e-5 * H.trace(), "never more than there is, in any direction"


@pytest.mark.parametrize("n", [9, N], ids=["few", "many"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_they_are_orthogonal_and_the_largest_comes_first(n: int, dtype: torch.dtype) -> None:
    V = leading_of(decaying(dtype=dtype)[:n], 40)
    products = (V @ V.T).double().numpy()
    sizes = products.diagonal()
    assert np.abs(products - np.diag(sizes)).max() < 100 * torch.finfo(dtype).eps * sizes.max()
    assert (np.diff(sizes) <= 0).all()


@pytest.mark.parametrize("n", [70, N], ids=["few", "many"])
def test_pieces_are_parts_of_one_sum(n: int) -> None:
    """Of any size, with the first one's coordinates busy or not."""
    rows = decaying()[:n]
    whole, parts = leading_of(rows, 40), leading_of(rows, 40, 3, 0, 40)
    kept, most = (float(V.square().sum()) for V in (parts, whole))
    assert kept == pytest.approx(most, rel=0.02)
    H = rows.T @ rows
    assert torch.linalg.eigvalsh(H - parts.T @ parts).min() > -1e-8 * H.trace()


@pytest.mark.parametrize("sources", [2, 3, 4, 8])
def test_pieces_in_turn_from_several_sources_all_count(sources: int) -> None:
    """Each source has coordinates of its own: a look at every so many pieces would see some of them only."""
    pieces = []
    for i in range(48):
        piece = torch.zeros(20, 80 * sources, dtype=torch.float64)
        piece[:, 80 * (i % sources) : 80 * (i % sources + 1)] = decaying(150, 80, seed=i % sources)[:20] * (1 + i / 48)
        pieces.append(piece)
    V, rows = leading(pieces, [20] * 48, 20), torch.cat(pieces)
    assert float(V.square().sum()) > 0.8 * float(np.square(best(rows, 20)).sum())


def test_rows_of_few_directions_lose_nothing() -> None:
    """More rows than are sketched, but of a rank below what is kept."""
    g = torch.Generator().manual_seed(3)
    rows = torch.randn(N, 12, generator=g, dtype=torch.float64) @ torch.randn(
        12, WIDTH, generator=g, dtype=torch.float64
    )
    V = leading_of(rows, 40)
    assert_close(V.T @ V, rows.T @ rows, 1e-10)
    assert len(V) == 12


def test_there_may_be_fewer_coordinates_than_directions() -> None:
    rows = torch.randn(400, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    V = leading_of(rows, 40)
    assert V.shape == (5, 5)
    assert_close(V.T @ V, rows.T @ rows, 1e-11)


def test_nothing_is_left_of_nothing() -> None:
    assert leading_of(torch.zeros(1, 6), 4).shape == (0, 6)
    assert leading_of(torch.zeros(60, 6), 4).shape == (0, 6)


def test_it_is_the_same_whenever_it_is_asked_for_and_draws_from_no_one_elses_numbers() -> None:
    rows = decaying()
    state = torch.get_rng_state()
    first = leading_of(rows, 40)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)
    assert torch.equal(leading_of(rows.clone(), 40), first)


@pytest.mark.parametrize(("n", "q"), [(10, 3), (9, 3), (2, 5), (7, 1), (100, 100)])
def test_each_row_is_in_one_sum_with_its_sign(n: int, q: int) -> None:
    """Rows that are unit vectors show where each went."""
    sums = signed_sums(torch.eye(n, dtype=torch.float64), q)
    assert sums.shape == (q, n)
    assert set(sums.flatten().tolist()) <= {-1.0, 0.0, 1.0}
    assert torch.equal(sums.abs().sum(0), torch.ones(n, dtype=torch.float64))
    sizes = sums.abs().sum(1)
    assert sizes.max() - sizes.min() <= 1, "groups of about one size"


def test_signs_and_order_are_mixed() -> None:
    sums = signed_sums(torch.eye(400, dtype=torch.float64), 20)
    assert 150 < float((sums > 0).sum()) < 250
    places = sums.abs().argmax(0)
    assert not torch.equal(places, places.sort().values)
    assert not torch.equal(places, torch.arange(400) % 20)
    assert torch.equal(signed_sums(torch.eye(400, dtype=torch.float64), 20), sums)


def test_squares_add_up_on_average() -> None:
    """Products of different rows have either sign: over many sets of rows the sums keep Σ ‖v‖²."""
    ratios = []
    for seed in range(200):
        rows = torch.randn(60, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 2.0
        ratios.append(float(signed_sums(rows * random_signs(60, seed), 6).square().sum() / rows.square().sum()))
    assert np.mean(ratios) == pytest.approx(1.0, abs=4 * np.std(ratios) / len(ratios) ** 0.5)
    assert 0.2 < np.std(ratios) < 1.0, "of one set alone they do not"


def random_signs(n: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).choice([-1.0, 1.0], (n, 1)))


@pytest.mark.parametrize(("n", "p"), [(4, 9), (1, 9), (9, 9)])
def test_the_smallest_vector_with_these_products(n: int, p: int) -> None:
    g = torch.Generator().manual_seed(n)
    rows, dots = torch.randn(n, p, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)
    d = smallest(rows, dots)
    expected = torch.from_numpy(np.linalg.pinv(rows.numpy()) @ dots.numpy())
    slack = 1e-6 * float(np.linalg.cond(rows.numpy()) ** 2)  # the millionth that is added to the products
    assert_close(d, expected, slack)
    assert_close(rows @ d, dots, slack)


def test_rows_that_repeat_have_one_answer() -> None:
    """Dependent rows whose products agree: nothing blows up, in float32 neither."""
    g = torch.Generator().manual_seed(5)
    three = torch.randn(3, 8, generator=g, dtype=torch.float64)
    rows = torch.cat([three, three, three.sum(0, keepdim=True), torch.zeros(2, 8, dtype=torch.float64)])
    dots = rows @ torch.randn(8, generator=g, dtype=torch.float64)
    expected = torch.from_numpy(np.linalg.pinv(rows.numpy()) @ dots.numpy())
    assert_close(smallest(rows, dots), expected, 1e-4)
    single = smallest(rows.float(), dots)
    assert single.dtype == torch.float32
    assert_close(single, expected, 1e-4)
    assert not bool(smallest(torch.zeros(2, 8), torch.zeros(2)).any())
