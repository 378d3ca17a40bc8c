"""Sides, spectra and the shared budget, against numpy and against trying every way of sharing."""

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import assert_close
from torch import Tensor

from backstory.maths import learning
from backstory.maths.learning import allocated, spectrum, widened
from backstory.maths.subspace import Shape


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
    assert torch.equal(first.vectors, again.vectors)
    assert torch.equal(first.values, again.values)
    assert bool((first.vectors.gather(0, first.vectors.abs().argmax(0, keepdim=True)) > 0).all())


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
