"""Sketches against the sum that they stand for; numbers of columns against the matrices X, Y and Z of the same recursion, in numpy."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.maths.examples import RULES, P, random_steps
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.shared_curvature import Columns, Sketch, columns, orthogonal, orthogonal_again
from backstory.maths.steps import Step


def window(rule: str, clipped: bool) -> list[Step]:
    g = torch.Generator().manual_seed(2)
    Q = torch.linalg.qr(torch.randn(P, P, generator=g, dtype=torch.float64)).Q
    V = Q[:3] * torch.tensor([[1.5], [0.7], [0.2]], dtype=torch.float64)
    made = random_steps(rule, clipped=clipped)
    return [s._replace(V=V, dot_v=V @ (s.w @ s.G), orthogonal=True) for s in made]


def written_out(steps: list[Step], s: np.ndarray, B1: np.ndarray, B2: np.ndarray, m: dict[int, np.ndarray]) -> Any:
    """X, Y before the first step and Z of each, (p, R), every product a matrix; γ = 1."""
    assert steps[0].V is not None
    V = steps[0].V.numpy()
    X, Y, Z = np.zeros_like(B1), np.zeros_like(B1), {}
    for t in reversed(range(len(steps))):
        step, k = steps[t], steps[t].coefficients
        alpha = step.clip * k.rate * ((1 - k.tau) * k.a + k.n)
        U = Y - k.rate * k.a * X
        Z[t] = (1 - k.tau) * U - k.rate * k.n * X
        SV = s[t, 0] * B1 + s[t, 1] * B2 + Z[t] @ V @ V.T
        if step.clip < 1:
            assert step.dot_v is not None
            SV = step.clip * (SV - np.outer(m[t], step.dot_v.numpy()))
        X = (1 - k.rate * k.decay) * X + k.l2 * Z[t] + SV @ np.linalg.inv(np.eye(len(V)) + alpha * V @ V.T)
        Y = k.momentum * U
    return X, Y, Z


@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov", "adam", "plain, then momentum"])
def test_columns_are_the_recursion(rule: str, clipped: bool) -> None:
    assert rule in RULES
    steps, g = window(rule, clipped), np.random.default_rng(1)
    s, (B1, B2) = g.normal(size=(len(steps), 2)), g.normal(size=(2, P, 3))
    m = {t: g.normal(size=P) for t, step in enumerate(steps) if step.clip < 1}
    met = [torch.from_numpy(g.normal(size=(len(step.w) + (t in m), 3))) for t, step in enumerate(steps)]
    X, Y, Z = written_out(steps, s, B1, B2, m)
    actual = columns(steps, torch.from_numpy(s), met, 1.0)
    M = np.array(list(m.values())).reshape(len(m), P)
    for numbers, expected in ((actual.x, X), (actual.y, Y)):
        n = numbers.numpy()
        assert_close(torch.from_numpy(B1 * n[0] + B2 * n[1] + M.T @ n[2:]), torch.from_numpy(expected), 1e-12)
    _assert_met(actual, met, Z, B1, B2, M)


def _assert_met(
    actual: Columns, met: list[torch.Tensor], Z: dict[int, np.ndarray], B1: np.ndarray, B2: np.ndarray, M: np.ndarray
) -> None:
    """Rows times Zᵀ of their own step, as a propagator puts them together."""
    for t, (rows, L) in enumerate(zip(met, actual.L.split([len(x) for x in met]), strict=True)):
        x, z = rows.numpy(), actual.z[t].numpy()
        whole = (x * z[0]) @ B1.T + (x * z[1]) @ B2.T + L.numpy() @ M
        assert_close(torch.from_numpy(whole), torch.from_numpy(x @ Z[t].T), 1e-12, f"step {t}")


def test_memory_does_not_grow_with_the_square_of_the_steps() -> None:
    steps = window("momentum", clipped=True)
    actual = columns(steps, torch.zeros(len(steps), 2), [torch.zeros(1, 3).double()] * len(steps), "always")
    assert actual.z.shape == (len(steps), 2, 3)


def rows(n: int, p: int, seed: int = 0, decay: float = 1.0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, p, generator=g, dtype=torch.float64) * decay ** torch.arange(p)


@pytest.mark.parametrize(("n", "p"), [(3, 10), (10, 10), (75, 10), (200, 10)], ids=["few", "square", "many", "more"])
@pytest.mark.parametrize("piece", [1, 7, 200])
def test_without_a_limit_it_is_the_sum(n: int, p: int, piece: int) -> None:
    V, sketch = rows(n, p), Sketch(p)
    for part in V.split(piece):
        sketch.add(part)
    actual = sketch.rows()
    assert len(actual) == min(n, p)
    assert_close(actual.T @ actual, V.T @ V, 1e-11)
    assert sketch.retained == pytest.approx(sketch.total, rel=1e-12)


def test_rows_are_orthogonal_and_sorted() -> None:
    actual = orthogonal(rows(30, 8))
    products = actual @ actual.T
    sizes = products.diagonal()
    assert_close(products, torch.diag(sizes), 1e-10)
    assert bool((sizes[1:] <= sizes[:-1]).all())


def test_a_limit_keeps_the_leading_directions() -> None:
    V, sketch = rows(12, 10), Sketch(10, 4)
    sketch.add(V)  # at once: nothing is reduced before the end
    values, U = np.linalg.eigh(V.numpy().T @ V.numpy())
    best = (U[:, -4:] * values[-4:]) @ U[:, -4:].T
    actual = sketch.rows()
    assert actual.shape == (4, 10)
    assert_close(actual.T @ actual, torch.from_numpy(best), 1e-11)
    assert sketch.retained / sketch.total == pytest.approx(values[-4:].sum() / values.sum(), rel=1e-12)


def test_a_stream_comes_close_to_the_best_of_its_size() -> None:
    V, sketch = rows(400, 30, decay=0.8), Sketch(30, 8)
    for part in V.split(9):
        sketch.add(part)
    H = V.T @ V
    best = torch.linalg.eigvalsh(H)[-8:].sum() / H.trace()
    actual = sketch.rows()
    assert actual.shape == (8, 30)
    assert 0.97 * best < sketch.retained / sketch.total <= best + 1e-12
    assert bool((torch.linalg.eigvalsh(H - actual.T @ actual) > -1e-9).all()), "a sketch never holds more than the sum"


def test_rows_that_change_afterwards_do_not_matter() -> None:
    V, sketch = rows(3, 5), Sketch(5)
    kept = V.clone()
    sketch.add(V)
    V.zero_()
    assert_close(sketch.rows().T @ sketch.rows(), kept.T @ kept, 1e-12)


def test_equal_rows_count_once() -> None:
    V = rows(1, 6).expand(5, 6)
    actual = orthogonal(V)
    assert actual.shape == (1, 6)
    assert_close(actual.T @ actual, V.T @ V, 1e-12)


def test_nothing_is_all_of_nothing() -> None:
    sketch = Sketch(4)
    sketch.add(torch.zeros(2, 4))
    assert len(sketch.rows()) == 0
    assert sketch.retained == sketch.total == 0.0


def test_float32_rows_keep_what_adds_up() -> None:
    """A long tail far below the largest eigenvalue, but not below rounding."""
    V = torch.cat([torch.eye(300)[:1] * 1e2, torch.eye(300)[1:] * 0.3])  # 1e-5 of the largest, each
    actual = orthogonal(V)
    assert actual.dtype == torch.float32
    assert len(actual) == 300
    assert float(actual.square().sum()) == pytest.approx(float(V.square().sum()), rel=1e-6)


def test_rows_that_were_rounded_are_orthogonal_again() -> None:
    """Nothing is lost of the small ones beside the large ones: each direction's curvature is right to rounding."""
    Q = torch.linalg.qr(rows(60, 60)).Q[:20]
    V = (Q * 10 ** torch.linspace(2, -2, 20, dtype=torch.float64)[:, None]).float()
    rounded = (V * 100 / V.abs().amax(1, keepdim=True)).round() * V.abs().amax(1, keepdim=True) / 100
    actual = orthogonal_again(rounded)
    assert actual.dtype == torch.float32
    unit = actual.double() / actual.double().norm(dim=1, keepdim=True)
    assert_close(unit @ unit.T, torch.eye(20, dtype=torch.float64), 1e-6)
    H, exact = actual.double().T @ actual.double(), rounded.double().T @ rounded.double()
    for q in Q:  # from 1e4 to 1e-4
        assert float((q @ H @ q) / (q @ exact @ q)) == pytest.approx(1, abs=1e-4)
    assert_close(orthogonal_again(rounded.double()).T @ orthogonal_again(rounded.double()), exact, 1e-12)


def test_rows_that_never_were_orthogonal_are_made_so() -> None:
    V = rows(30, 8)
    assert_close(orthogonal_again(V), orthogonal(V), 1e-12)
    assert len(orthogonal_again(torch.zeros(3, 4))) == 0
