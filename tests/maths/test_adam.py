"""Adam's diagonal, factored: against 1/(√v̂ + ε) written out, and preconditioned coordinates against raw ones."""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.maths.examples import P, adam, joined, plain, queries
from tests.support.oracles import assert_close, assert_same
from torch import Tensor

from backstory.maths import adam as preconditioner
from backstory.maths.adam import Scale, drift, factor_scale, scale_contribution, scale_dense, size
from backstory.maths.adjoint import Adjoint
from backstory.maths.blocked import Propagator
from backstory.maths.layers import Contribution, Dense, Outer, Sum
from backstory.maths.projection import Basis, Shape, project, shape_of
from backstory.maths.steps import Coefficients, Contraction, Step
from backstory.maths.tangent import Tangent

B, S, D_OUT, D_IN = 3, 4, 7, 5
MATRIX, VECTOR = Shape(D_OUT, D_IN, D_OUT, D_IN), Shape(D_OUT, 0, D_OUT, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def positive(*shape: int, seed: int = 0) -> Tensor:
    """From about 0.02 to 50."""
    return (2 * normal(*shape, seed=seed)).exp()


def written_out(scale: Scale) -> Tensor:
    """P^½ at every coordinate: (d_out, d_in), or (d_out,)."""
    if scale.right is None:
        return scale.left
    return torch.stack([torch.stack([l * r for r in scale.right]) for l in scale.left])


@pytest.mark.parametrize("eps", [0.0, 3e-3])
@pytest.mark.parametrize("size", [(D_OUT, D_IN), (4, 3, 2, 2)], ids=["matrix", "convolution"])
def test_a_diagonal_of_rank_one_is_exact(size: tuple[int, ...], eps: float) -> None:
    """u = (√v̂ + ε)² = x yᵀ, with v̂ what that makes it; then P = 1/√u."""
    shape = shape_of(torch.Size(size), None)
    u = torch.outer(positive(shape.d_out), positive(shape.d_in, seed=1))
    assert u.sqrt().min() > eps
    v_hat = (u.sqrt() - eps).square()
    actual = written_out(factor_scale(v_hat.reshape(size), eps, shape))
    causes = "A common factor: (Σr)^¼ left out or on both sides; ratios that vary by row or column: the exponent."
    assert_close(actual.square(), 1 / (v_hat.sqrt() + eps), 1e-12, causes)


def test_any_other_diagonal_is_adafactors() -> None:
    """1/P² ≈ r cᵀ / Σr, with r and c the sums of rows and columns."""
    v_hat, eps = positive(D_OUT, D_IN), 0.1
    u = (v_hat.sqrt() + eps) ** 2
    expected = [[(u.sum() / (u[i].sum() * u[:, j].sum())).sqrt() for j in range(D_IN)] for i in range(D_OUT)]
    actual = written_out(factor_scale(v_hat, eps, MATRIX))
    assert_close(actual.square(), torch.tensor(expected, dtype=torch.float64), 1e-12)
    assert not torch.allclose(actual.square(), 1 / u.sqrt(), rtol=0.05), "too close to rank one to show anything"


@pytest.mark.parametrize("piece", [1, 2 * D_IN, 3 * D_IN + 1])
def test_pieces_add_up(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Matrices are read some rows at a time; 7 rows in pieces of 1, 2 and 3."""
    v, gradient = positive(D_OUT, D_IN), normal(D_OUT, D_IN, seed=2)
    v[2] = v[:, 1] = 0.0
    whole = factor_scale(v, 0.1, MATRIX)
    length = size(gradient, whole, MATRIX)
    assert_same(length, (gradient * written_out(whole)).square().sum(), 2 * D_OUT * D_IN)
    monkeypatch.setattr(preconditioner, "PIECE", piece)
    assert_same(written_out(factor_scale(v, 0.1, MATRIX)), written_out(whole), D_OUT * D_IN)
    assert_same(size(gradient, whole, MATRIX), length, D_OUT * D_IN)


@pytest.mark.parametrize("shape", [MATRIX, VECTOR], ids=["matrix", "vector"])
def test_adams_correction_divides_v(shape: Shape) -> None:
    v = positive(*((D_OUT, D_IN) if shape.d_in else (D_OUT,)))
    actual, expected = factor_scale(v, 0.1, shape, 0.271), factor_scale(v / 0.271, 0.1, shape)
    assert_close(written_out(actual), written_out(expected), 1e-13)


@pytest.mark.parametrize("size", [(9,), ()], ids=["vector", "scalar"])
def test_a_vector_keeps_its_exact_diagonal(size: tuple[int, ...]) -> None:
    v_hat = positive(*size)
    left, right = factor_scale(v_hat, 0.3, shape_of(torch.Size(size), None))
    assert right is None
    assert_close(left.square(), (1 / (v_hat.sqrt() + 0.3)).reshape(-1), 1e-13)


@pytest.mark.parametrize("eps", [0.0, 1e-8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_what_never_had_a_gradient_gives_zero(eps: float, dtype: torch.dtype) -> None:
    v_hat = positive(D_OUT, D_IN).to(dtype)
    v_hat[2] = v_hat[5] = v_hat[:, 1] = 0.0
    left, right = factor_scale(v_hat, eps, MATRIX)
    assert right is not None
    assert [i for i, x in enumerate(left.tolist()) if x == 0] == [2, 5]
    assert [i for i, x in enumerate(right.tolist()) if x == 0] == [1]
    alone = factor_scale(v_hat[2], eps, Shape(D_IN, 0, D_IN, 0))
    nothing = factor_scale(torch.zeros(D_OUT, D_IN, dtype=dtype), eps, MATRIX)
    for x in (left, right, alone.left, *nothing):
        assert x is not None
        assert x.isfinite().all()
    assert not alone.left.any()
    assert not written_out(nothing).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(D_OUT, D_IN), (D_OUT,)], ids=["matrix", "vector"])
def test_half_precision_is_widened_before_anything_is_done(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """ε = 1e-8 and sums of squares do not exist in float16."""
    v_hat = (1e-4 * positive(*size)).to(dtype)
    shape = shape_of(torch.Size(size), None)
    actual = factor_scale(v_hat, 1e-8, shape)
    assert actual.left.dtype == torch.float32
    assert_close(written_out(actual), written_out(factor_scale(v_hat.double(), 1e-8, shape)), 1e-6)
    assert factor_scale(v_hat.double(), 1e-8, shape).left.dtype == torch.float64


def contributions() -> dict[str, tuple[Contribution, Tensor, Shape]]:
    """A contribution, the gradients that it stands for, one sample and position at a time, and the shape."""
    left, right = normal(B, S, D_OUT), normal(B, S, D_IN, seed=1)
    tokens = torch.randint(D_OUT, (B, S), generator=torch.Generator().manual_seed(2))
    hot = F.one_hot(tokens, D_OUT).double()

    def gradients(lefts: Tensor) -> Tensor:
        return torch.stack(
            [sum((torch.outer(lefts[b, s], right[b, s]) for s in range(S)), torch.zeros(())) for b in range(B)]
        )

    return {
        "factors": (Outer(left, right), gradients(left), MATRIX),
        "tokens": (Outer(tokens, right), gradients(hot), MATRIX),
        "sum": (Sum(left), left[:, 0] + left[:, 1] + left[:, 2] + left[:, 3], VECTOR),
        "dense vector": (Dense(left[:, 0]), left[:, 0], VECTOR),
        "dense matrix": (Dense(gradients(left)), gradients(left), MATRIX),
        "dense convolution": (Dense(normal(B, D_OUT, D_IN, 2)), normal(B, D_OUT, D_IN, 2), Shape(D_OUT, 10, D_OUT, 10)),
    }  # fmt: skip


@pytest.mark.parametrize("name", contributions())
def test_scaled_contributions_are_scaled_gradients(name: str) -> None:
    part, gradients, shape = contributions()[name]
    scale = factor_scale(positive(*gradients.shape[1:], seed=3), 1e-3, shape)
    half = written_out(scale).reshape(gradients.shape[1:])
    expected = torch.stack([half * g for g in gradients]).reshape(B, -1)
    whole = Basis(None, None)
    assert_close(
        project(scale_contribution(part, scale, shape), shape, whole), expected, 1e-12, "Left and right swapped?"
    )
    assert_close(scale_dense(gradients, scale, shape).reshape(B, -1), expected, 1e-12)


def test_scaling_keeps_the_dtype_of_the_rows() -> None:
    for part, _, shape in contributions().values():
        if isinstance(part, Sum | Dense):
            low = type(part)(part[0].float())
            scale = Scale(positive(shape.d_out), positive(shape.d_in, seed=1) if shape.d_in else None)
            assert {x.dtype for x in scale_contribution(low, scale, shape)} == {torch.float32}


# drift


def brute_drift(before: Scale, now: Scale) -> float:
    """The mean of (log P' − log P)² over every coordinate at which both are above 0, one by one."""
    squares = [
        (torch.log(b**2) - torch.log(a**2)).item() ** 2
        for a, b in zip(written_out(before).flatten(), written_out(now).flatten(), strict=True)
        if a > 0 and b > 0
    ]
    return sum(squares) / len(squares) if squares else 0.0


entries = st.lists(st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 40.0]), min_size=3, max_size=3)


@settings(deadline=None, derandomize=True)
@given(entries, entries, st.none() | st.tuples(entries, entries))
def test_drift_is_the_mean_square_change_of_log_P(a: list[float], b: list[float], right: tuple[list[float], list[float]] | None) -> None:  # fmt: skip
    """Unseen coordinates (0) included: those that either does not know are left out."""
    sides = (None, None) if right is None else [torch.tensor(x, dtype=torch.float64) for x in right]
    before, now = (Scale(torch.tensor(x, dtype=torch.float64), y) for x, y in zip((a, b), sides, strict=True))
    assert drift(before, now).item() == pytest.approx(brute_drift(before, now), rel=1e-10, abs=1e-14)


def test_drift_of_known_changes() -> None:
    scale = Scale(positive(D_OUT), positive(D_IN, seed=1))
    assert scale.right is not None
    assert drift(scale, scale) == 0.0
    assert drift(Scale(scale.left, None), Scale(scale.left, None)) == 0.0
    third = torch.log(torch.tensor(3.0)).item() ** 2
    tripled = Scale(scale.left * 3**0.25, scale.right * 3**0.25)
    assert drift(scale, tripled).item() == pytest.approx(third), "a common factor is a change too"
    moved = Scale(scale.left * 7, scale.right / 7)
    assert drift(scale, moved).item() == pytest.approx(0.0, abs=1e-24), "P is the same, only its factors are others"
    one = torch.ones(D_OUT, dtype=torch.float64)
    one[0] = 3**0.5
    assert drift(scale, Scale(scale.left * one, scale.right)).item() == pytest.approx(third / D_OUT)


# preconditioned coordinates


class Rows(NamedTuple):
    """Rows of a 2 × 2 matrix and a vector of 2, side by side: as they are, and times P^½."""

    raw: Tensor  # (B, p)
    preconditioned: Tensor  # (B, p)


SIDES = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([0.2, 7.0], dtype=torch.float64)
ALONE = torch.tensor([0.04, 9.0], dtype=torch.float64)
LITTLE, SHORT = Shape(2, 2, 2, 2), Shape(2, 0, 2, 0)
EPS = 0.05


def second_moments() -> tuple[Tensor, Tensor]:
    """v̂ of the matrix, with (√v̂ + ε)² of rank one, and of the vector."""
    return (torch.outer(*SIDES) - EPS).square(), ALONE


def exact_diagonal() -> Tensor:
    return torch.cat([1 / (v.sqrt() + EPS).flatten() for v in second_moments()])


def rows(count: int, seed: int) -> Rows:
    """Two positions for each sample."""
    outer, values = Outer(normal(count, 2, 2, seed=seed), normal(count, 2, 2, seed=seed + 1)), Sum(normal(count, 2, 2, seed=seed + 2))  # fmt: skip
    v_matrix, v_vector = second_moments()
    scales = factor_scale(v_matrix, EPS, LITTLE), factor_scale(v_vector, EPS, SHORT)
    whole = Basis(None, None)
    raw = [project(outer, LITTLE, whole), project(values, SHORT, whole)]
    preconditioned = [project(scale_contribution(outer, scales[0], LITTLE), LITTLE, whole), project(scale_contribution(values, scales[1], SHORT), SHORT, whole)]  # fmt: skip
    return Rows(torch.cat(raw, 1), torch.cat(preconditioned, 1))


def both_steps(t: int, k: Coefficients, clipped: bool, own: bool) -> tuple[Step, Step]:
    """One step in raw coordinates with the exact P, and in preconditioned ones with P = 1; the dots are raw in both."""
    G, V = rows(3, 10 * t), rows(2 * 3, 10 * t + 5)
    w = torch.rand(3, generator=torch.Generator().manual_seed(t), dtype=torch.float64) + 0.2
    n = w @ G.raw
    clip, norm = (0.6 if clipped and t % 2 == 0 else 1.0), n.norm().item()
    dots = G.raw @ n, V.raw @ n if own else None
    raw = Step(G.raw, w, k._replace(P=exact_diagonal()), V.raw if own else None, clip, norm, *dots)
    return raw, Step(G.preconditioned, w, k, V.preconditioned if own else None, clip, norm, *dots)


@pytest.mark.parametrize("contraction", ["never", 1.0, "always", "when_expanding"])
@pytest.mark.parametrize("own", [False, True], ids=["fisher", "own rows"])
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("groups", [False, True], ids=["one group", "two groups"])
def test_preconditioned_coordinates_equal_raw_ones(
    groups: bool, clipped: bool, own: bool, contraction: Contraction
) -> None:
    """P constant and of rank one, decoupled decay: the same influences, whichever way they are computed."""
    first = [adam(0.1 + 0.02 * t, t + 1) for t in range(6)]
    ks = [joined(k, plain(0.3)._replace(decay=0.2), (4, 2)) if groups else k for k in first]
    pairs = [both_steps(t, k, clipped, own) for t, k in enumerate(ks)]
    raw, preconditioned = ([pair[i] for pair in pairs] for i in (0, 1))
    v = queries()
    v_preconditioned = v * exact_diagonal().sqrt()
    expected, actual = by_adjoint(raw, v, contraction), by_adjoint(preconditioned, v_preconditioned, contraction)
    causes = "P and P^½ mixed up: ratios that vary with the coordinates; clipping with preconditioned dots: clipped steps only."
    assert_close(actual, expected, 1e-10, causes)
    embedded = torch.cat(Propagator(P, dtype=torch.float64, contraction=contraction).embed(preconditioned))
    assert_close(v_preconditioned @ embedded.T, expected, 1e-10, causes)
    assert_close(
        v_preconditioned @ by_forward(preconditioned, contraction).T, v @ by_forward(raw, contraction).T, 1e-10, causes
    )


def by_adjoint(steps: list[Step], v: Tensor, contraction: Contraction) -> Tensor:
    adjoint = Adjoint(v, contraction=contraction)
    return torch.cat([adjoint.influence(step) for step in reversed(steps)][::-1], 1)


def by_forward(steps: list[Step], contraction: Contraction) -> Tensor:
    """Displacements of three samples: one at every step, one at every second, one once."""
    tracked = Tangent(3, P, dtype=torch.float64, contraction=contraction)
    for t, step in enumerate(steps):
        tracked.advance(step, [(0, 0), *([(1, 1)] if t % 2 else []), *([(2, 2)] if t == 3 else [])])
    return tracked.x
