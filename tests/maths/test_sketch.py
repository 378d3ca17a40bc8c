"""Sketches against the sum that they stand for, taken in one piece by numpy."""

import numpy as np
import pytest
import torch
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.sketch import Sketch, orthogonal


def rows(n: int, p: int, seed: int = 0, decay: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, p, generator=g, dtype=torch.float64) * decay ** torch.arange(p)


@pytest.mark.parametrize(("n", "p"), [(3, 10), (10, 10), (75, 10), (200, 10)], ids=["few", "square", "many", "more"])
@pytest.mark.parametrize("piece", [1, 7, 200])
def test_without_a_limit_it_is_the_sum(n: int, p: int, piece: int) -> None:
    V, sketch = rows(n, p), Sketch(p)
    for part in V.split(piece):
        sketch.add(part)
    found = sketch.rows()
    assert len(found) == min(n, p)
    assert_close(found.T @ found, V.T @ V, 1e-11)
    assert sketch.kept == pytest.approx(sketch.total, rel=1e-12)


def test_rows_are_orthogonal_and_sorted() -> None:
    found = orthogonal(rows(30, 8))
    products = found @ found.T
    sizes = products.diagonal()
    assert_close(products, torch.diag(sizes), 1e-10)
    assert bool((sizes[1:] <= sizes[:-1]).all())


def test_a_limit_keeps_the_leading_directions() -> None:
    V, sketch = rows(12, 10), Sketch(10, 4)
    sketch.add(V)  # at once: nothing is reduced before the end
    values, U = np.linalg.eigh(V.numpy().T @ V.numpy())
    best = (U[:, -4:] * values[-4:]) @ U[:, -4:].T
    found = sketch.rows()
    assert found.shape == (4, 10)
    assert_close(found.T @ found, torch.from_numpy(best), 1e-11)
    assert sketch.kept / sketch.total == pytest.approx(values[-4:].sum() / values.sum(), rel=1e-12)


def test_a_stream_comes_close_to_the_best_of_its_size() -> None:
    V, sketch = rows(400, 30, decay=0.8), Sketch(30, 8)
    for part in V.split(9):
        sketch.add(part)
    H = V.T @ V
    best = torch.linalg.eigvalsh(H)[-8:].sum() / H.trace()
    found = sketch.rows()
    assert found.shape == (8, 30)
    assert 0.97 * best < sketch.kept / sketch.total <= best + 1e-12
    assert bool((torch.linalg.eigvalsh(H - found.T @ found) > -1e-9).all()), "a sketch never holds more than the sum"


def test_rows_that_change_afterwards_do_not_matter() -> None:
    V, sketch = rows(3, 5), Sketch(5)
    kept = V.clone()
    sketch.add(V)
    V.zero_()
    assert_close(sketch.rows().T @ sketch.rows(), kept.T @ kept, 1e-12)


def test_equal_rows_count_once() -> None:
    V = rows(1, 6).expand(5, 6)
    found = orthogonal(V)
    assert found.shape == (1, 6)
    assert_close(found.T @ found, V.T @ V, 1e-12)


def test_nothing_is_all_of_nothing() -> None:
    sketch = Sketch(4)
    sketch.add(torch.zeros(2, 4))
    assert len(sketch.rows()) == 0
    assert sketch.kept == sketch.total == 0.0


def test_float32_rows_keep_what_adds_up() -> None:
    """A long tail far below the largest eigenvalue, but not below rounding."""
    V = torch.cat([torch.eye(300)[:1] * 1e2, torch.eye(300)[1:] * 0.3])  # 1e-5 of the largest, each
    found = orthogonal(V)
    assert found.dtype == torch.float32
    assert len(found) == 300
    assert float(found.square().sum()) == pytest.approx(float(V.square().sum()), rel=1e-6)
