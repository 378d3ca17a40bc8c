"""Sides, spectra and the shared budget, against numpy and against trying every way of sharing."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.oracles import assert_close, assert_same
from torch import Tensor

from backstory.maths import learning
from backstory.maths.layers import Contribution, Dense, Outer, Sum
from backstory.maths.learning import allocated, energy, spectrum, spectrum_of_rows, sufficient, widened
from backstory.maths.projection import Shape
from backstory.maths.sides import signed


def decaying(n: int, power: float, *, rows: int | None = None, seed: int = 0) -> Tensor:
    """XᵀX of random rows whose directions, in a random frame, fade as k^(−power/2)."""
    g = torch.Generator().manual_seed(seed)
    frame = torch.from_numpy(np.linalg.qr(torch.randn(n, n, generator=g, dtype=torch.float64).numpy())[0])
    X = torch.randn(rows or 3 * n, n, generator=g, dtype=torch.float64)
    X = (X * torch.arange(1, n + 1, dtype=torch.float64) ** (-power / 2)) @ frame
    return X.T @ X


def kept(C: Tensor, vectors: Tensor, k: int) -> float:
    """The energy in the first k columns, as a share of the most that any k columns hold."""
    V = vectors[:, :k].double().numpy()
    best = np.linalg.eigvalsh(C.double().numpy())[::-1][:k].sum()
    return float(np.einsum("ij,ik,kj->", V, C.double().numpy(), V) / best)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (Shape(100, 80, 16, 16), Shape(100, 80, 48, 48)),
        (Shape(100, 80, 4, 8), Shape(100, 80, 12, 24)),
        (Shape(20, 80, 16, 16), Shape(20, 80, 20, 48)),
        (Shape(10, 3, 10, 3), Shape(10, 3, 10, 3)),
        (Shape(100, 0, 64, 0), Shape(100, 0, 64, 0)),
    ],
)
def test_sides_are_three_times_as_wide_and_no_wider_than_the_parameter(shape: Shape, expected: Shape) -> None:
    assert widened(shape) == expected


def test_a_spectrum_is_that_of_numpy_largest_first() -> None:
    C = decaying(12, 1.0)
    found = spectrum(C, 3)
    values, vectors = np.linalg.eigh(C.numpy())
    assert found.vectors.shape == (12, 12), "a narrow problem is solved whole"
    assert_close(found.values, torch.from_numpy(values[::-1].copy()), 1e-12)
    cosines = (found.vectors * torch.from_numpy(vectors[:, ::-1].copy())).sum(0).abs()
    assert_close(cosines, torch.ones(12, dtype=torch.float64), 1e-10)


def test_rounding_below_zero_is_zero() -> None:
    x = torch.ones(6, 1, dtype=torch.float64) / 3
    values = spectrum(x @ x.T - 1e-18 * torch.eye(6, dtype=torch.float64), 6).values
    assert bool((values >= 0).all())
    assert_close(values.sum()[None], (x * x).sum()[None], 1e-12)


@pytest.mark.parametrize("narrow", [1024, 8])
def test_signs_are_fixed_and_nothing_is_drawn_from_the_global_generator(
    narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learning, "PRECISE", narrow)
    C = decaying(60, 1.0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = spectrum(C, 12)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = spectrum(C, 12)
    assert_same(again.vectors, first.vectors, 60 * 60)  # 60 terms; neighbouring eigenvalues are a 60th apart
    assert_same(again.values, first.values, 60)
    assert torch.equal(signed(-first.vectors), first.vectors)


@pytest.mark.parametrize("ends", [(1.0, -1.0), (-1.0, 1.0), (2.0, -1.0, -1.0), (1.0, 0.0, 0.0, -1.0)])
def test_rounding_does_not_decide_a_sign(ends: tuple[float, ...]) -> None:
    """Gradients of two classes' biases are (1, −1) times something: neither entry is the largest."""
    vector = torch.tensor(ends, dtype=torch.float64)[:, None]
    near = torch.cat([vector * (1 + 1e-15 * torch.eye(len(vector), dtype=torch.float64)), vector], 1)
    for found in (signed(near), signed(-near)):
        assert_same(found, signed(vector).expand_as(near), 20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_the_leading_part_of_a_wide_problem_is_as_good(
    power: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of what is computed is kept on average: that much must hold all but 0.5 % of the energy it could."""
    monkeypatch.setattr(learning, "PRECISE", 100)
    C = decaying(360, power).to(dtype)
    found = spectrum(C, 120)
    assert found.vectors.shape == (360, 120)
    assert found.values.dtype == torch.float64
    assert bool((found.values.diff() <= 0).all())
    V = found.vectors.double()
    assert_close(V.T @ V, torch.eye(120, dtype=torch.float64), 1e-5, "not orthonormal")
    assert_close((V * (C.double() @ V)).sum(0), found.values, 1e-4, "values are not those of the vectors")
    for k in (1, 10, 40, 80):
        assert kept(C, V, k) > 0.995, f"{k} columns hold {kept(C, V, k):.4f} of the energy that {k} could"


def test_a_wide_problem_of_few_rows_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PRECISE", 50)
    C = decaying(200, 1.0, rows=7).float()
    found = spectrum(C, 30)
    assert kept(C, found.vectors, 7) == pytest.approx(1, abs=1e-5)
    assert float(found.values[7:].sum()) < 1e-4 * float(found.values[:7].sum())
    nothing = spectrum(torch.zeros(200, 200), 30)
    assert bool(nothing.vectors.isfinite().all())
    assert bool((nothing.values == 0).all())


def test_where_most_of_a_wide_problem_is_asked_for_it_is_solved_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "PRECISE", 50)
    C = decaying(90, 1.0)
    found = spectrum(C, 46)
    assert found.vectors.shape == (90, 90)
    assert kept(C, found.vectors, 46) == pytest.approx(1, abs=1e-10)


SPECTRA = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda v: sorted(v, reverse=True)), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(SPECTRA, st.data())
def test_no_other_way_of_sharing_holds_more(values: list[list[int]], data: st.DataObject) -> None:
    budget = data.draw(st.integers(len(values), sum(map(len, values))))
    found = allocated([torch.tensor(v, dtype=torch.float64) for v in values], budget)
    ways = [way for way in product(*(range(1, len(v) + 1) for v in values)) if sum(way) == budget]
    assert tuple(found) in ways, "at least one each, no more than there are, the budget in all"
    energy = {way: sum(sum(v[:k]) for v, k in zip(values, way, strict=True)) for way in ways}
    assert energy[tuple(found)] == max(energy.values())


def test_of_equal_eigenvalues_the_first_parameters_come_first() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    assert allocated([ones, ones, ones], 6) == [3, 2, 1]
    many = [torch.ones(40, dtype=torch.float64)] * 3  # more than a sort that is stable by chance would keep in order
    assert allocated(many, 70) == [40, 29, 1]


@pytest.mark.parametrize("budget", [1, 6])
def test_a_budget_that_cannot_be_shared_out_is_refused(budget: int) -> None:
    with pytest.raises(
        ValueError, match=rf"{budget} coordinates cannot be shared out among 2 parameters of sizes \[2, 3\]"
    ):
        allocated([torch.ones(2), torch.ones(3)], budget)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("most", [6, 100])
def test_few_rows_have_the_spectrum_of_numpys_svd(most: int, dtype: torch.dtype) -> None:
    X = torch.randn(9, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    X[7] = X[2] - 2 * X[5]
    found = spectrum_of_rows(X, most)
    _, S, Vt = np.linalg.svd(X.double().numpy())
    m = min(most, 8)
    assert found.vectors.shape == (40, m), "a row that is a sum of others gives no coordinate"
    assert found.vectors.dtype == dtype
    assert_close(found.values, torch.from_numpy(S[:m] ** 2), 1e-6 if dtype == torch.float32 else 1e-12)
    V, tolerance = found.vectors.double(), 1e-6 if dtype == torch.float32 else 1e-10
    assert_close(V.T @ V, torch.eye(m, dtype=torch.float64), tolerance, "not orthonormal")
    cosines = (V * torch.from_numpy(Vt[:m].T.copy())).sum(0).abs()
    assert_close(cosines, torch.ones(m, dtype=torch.float64), tolerance)
    assert torch.equal(signed(-V), V), "the sign is free"


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_of_nothing_have_one_coordinate(rows: int) -> None:
    found = spectrum_of_rows(torch.zeros(rows, 5), 4)
    assert (found.values.tolist(), tuple(found.vectors.shape)) == ([0.0], (5, 1))
    assert float(found.vectors.norm()) == 1


@settings(max_examples=200, deadline=None)
@given(SPECTRA, st.floats(0.01, 1.2), st.integers(0, 16))
def test_no_fewer_coordinates_hold_the_energy(values: list[list[int]], share: float, more: int) -> None:
    """Against every way of keeping some of each, in whole numbers, so that nothing is rounded."""
    wanted, most = share * sum(map(sum, values)), len(values) + more
    found = sufficient([torch.tensor(v, dtype=torch.float64) for v in values], wanted, most)
    ways = list(product(*(range(1, len(v) + 1) for v in values)))
    enough = [sum(w) for w in ways if sum(sum(v[:k]) for v, k in zip(values, w, strict=True)) >= wanted]
    useful = sum(max(1, sum(x > 0 for x in v)) for v in values)  # all that is not zero, and one of each
    assert found == min([most, min(enough) if enough else useful])


def test_rounding_is_not_taken_for_energy() -> None:
    """Half of the energy lies outside of all sides: what is kept ends where the eigenvalues are noise."""
    values = torch.tensor([4.0, 1.0, 1e-8, 1e-9], dtype=torch.float64)
    assert sufficient([values], 10.0, 4) == 2
    assert sufficient([values], 5.0 + 1e-8, 4) == 3, "where they do add up to it, they are taken"


@pytest.mark.parametrize("kind", ["outer", "tokens", "dense", "vector", "sum"])
def test_energy_is_the_sum_of_squares_of_whole_gradients(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    left, right = (torch.randn(3, 4, d, generator=g, dtype=torch.float64) for d in (5, 6))
    tokens = torch.tensor([[1, 4, 1, 1], [0, 0, 2, 3], [3, 3, 3, 3]])
    matrix, vector = Shape(5, 6, 2, 2), Shape(5, 0, 5, 0)
    hot = torch.zeros(3, 4, 5, dtype=torch.float64).scatter_(2, tokens[:, :, None], 1.0)
    cases: dict[str, tuple[Contribution, Shape, Tensor]] = {
        "outer": (Outer(left, right), matrix, torch.einsum("bti,btj->bij", left, right)),
        "tokens": (Outer(tokens, right), matrix, torch.einsum("bti,btj->bij", hot, right)),
        "dense": (Dense(right.reshape(3, 24)[:, :18]), Shape(3, 6, 2, 2), right.reshape(3, 24)[:, :18]),
        "vector": (Dense(left[:, 0]), vector, left[:, 0]),
        "sum": (Sum(left), vector, left.sum(1)),
    }
    part, shape, G = cases[kind]
    assert energy(part, shape) == pytest.approx(float(G.square().sum()), rel=1e-12)
