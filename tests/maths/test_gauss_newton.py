"""A sample's Gauss-Newton matrix at its outputs, taken apart, against dense matrices."""

import pytest
import torch
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.gauss_newton import own_scale, signed_seeds, tilt

B, C = 5, 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def loss_of(kind: str, f: Tensor, y: Tensor, c: float) -> Tensor:
    """Of one sample."""
    if kind == "bce":
        return c * sum((torch.nn.functional.softplus(x) - t * x for x, t in zip(f, y, strict=True)), torch.zeros(()))
    return torch.logsumexp(f, 0) - y @ f


def hot(kind: str, labels: str) -> Tensor:
    if kind == "bce":
        return (normal(B, C, seed=3) > 0).double()
    one = torch.eye(C, dtype=torch.float64)[torch.tensor([0, 1, 2, 3, 1])]
    return one if labels == "hard" else 0.9 * one + 0.1 / C


CASES = [
    ("cross-entropy", "hard", 1.0),
    ("cross-entropy", "smoothed", 1.0),
    ("bce", "hard", 1.0),
    ("bce", "hard", 0.25),
]


def dense(kind: str, labels: str, c: float) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, their gradients, and Hessians by differentiating twice."""
    f, y = 2 * normal(B, C, seed=1), hot(kind, labels)
    deltas, hessians = [], []
    for one, label in zip(f, y, strict=True):

        def of(x: Tensor, label: Tensor = label) -> Tensor:
            return loss_of(kind, x, label, c)

        deltas.append(torch.autograd.functional.jacobian(of, one))
        hessians.append(torch.autograd.functional.hessian(of, one))
    return f, torch.stack(deltas), torch.stack(hessians)


@pytest.mark.parametrize(("kind", "labels", "c"), CASES)
def test_the_gradient_holds_as_much_as_it_can(kind: str, labels: str, c: float) -> None:
    """H − κ δδᵀ has no negative eigenvalue, and one that is 0 where δ is not in the way of any other."""
    f, delta, H = dense(kind, labels, c)
    kappa = own_scale(f, delta, kind, c)
    expected = [
        1 / float(d @ torch.linalg.pinv(h, hermitian=True, rtol=1e-12) @ d) for d, h in zip(delta, H, strict=True)
    ]
    assert_close(kappa, torch.tensor(expected, dtype=torch.float64), 1e-9)
    rest = H - kappa[:, None, None] * delta[:, :, None] * delta[:, None]
    assert float(torch.linalg.eigvalsh(rest).min()) > -1e-12
    more = H - 1.01 * kappa[:, None, None] * delta[:, :, None] * delta[:, None]
    assert float(torch.linalg.eigvalsh(more).amin(1).max()) < 0


def products(f: Tensor, delta: Tensor, kind: str, c: float, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Σ u uᵀ and Σ c u' u'ᵀ of k seeds."""
    seeds = list(signed_seeds(f, kind, k, torch.Generator().manual_seed(seed)))
    assert len(seeds) == k
    rest = [u - tilt(f, delta, u, kind, c)[:, None] * delta for u in seeds]
    plain, less = (torch.stack(x) for x in (seeds, rest))
    return torch.einsum("kbi,kbj->bij", plain, plain), c * torch.einsum("kbi,kbj->bij", less, less)


@pytest.mark.parametrize(("kind", "labels", "c"), CASES)
def test_as_many_seeds_as_ranks_are_exact(kind: str, labels: str, c: float) -> None:
    f, delta, H = dense(kind, labels, c)
    kappa = own_scale(f, delta, kind, c)[:, None, None]
    whole, rest = products(f, delta, kind, c, C if kind == "bce" else C - 1, seed=0)
    assert_close(c * whole, H, 1e-10)
    assert_close(rest, H - kappa * delta[:, :, None] * delta[:, None], 1e-10)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(("kind", "labels", "c"), CASES)
def test_fewer_seeds_are_right_on_average(kind: str, labels: str, c: float, k: int) -> None:
    f, delta, H = dense(kind, labels, c)
    draws = 3000
    pairs = [products(f, delta, kind, c, k, seed) for seed in range(draws)]
    whole, rest = (sum(x) / draws for x in zip(*pairs, strict=True))
    kappa = own_scale(f, delta, kind, c)[:, None, None]
    assert isinstance(whole, Tensor)
    assert isinstance(rest, Tensor)
    for actual, expected in ((c * whole, H), (rest, H - kappa * delta[:, :, None] * delta[:, None])):
        error = (actual - expected).flatten(1).norm(dim=1) / H.flatten(1).norm(dim=1)
        assert float(error.max()) < 0.08, f"largest error {float(error.max()):.3f}; 2 would be a sign that is not drawn"
    assert float((products(f, delta, kind, c, k, 0)[0] * c - H).norm()) > 1e-3 * float(H.norm())


@pytest.mark.parametrize("shape", [(B,), (B, 1)], ids=str)
def test_a_single_output_leaves_no_rest(shape: tuple[int, ...]) -> None:
    f = normal(*shape, seed=5)
    y = (normal(*shape, seed=6) > 0).double()
    p = f.sigmoid()
    assert_close(own_scale(f, p - y, "bce"), (p * (1 - p) / (p - y).square()).flatten(), 1e-12)
    (u,) = signed_seeds(f, "bce", 1, torch.Generator().manual_seed(0))
    assert u.shape == f.shape
    a = tilt(f, p - y, u, "bce")
    assert float((u.flatten() - a * (p - y).flatten()).abs().max()) < 1e-12


def test_a_sample_that_is_learned_has_no_curvature() -> None:
    f = torch.tensor([[800.0, 0.0, -3.0]], dtype=torch.float64)
    assert float(own_scale(f, torch.zeros(1, 3), "cross-entropy")) == 0
    assert float(tilt(f, torch.zeros(1, 3), torch.ones(1, 3), "cross-entropy")) == 0


def test_random_numbers_come_from_the_generator_alone() -> None:
    f = normal(B, C, seed=1)
    before = torch.get_rng_state()
    one, two = (next(signed_seeds(f, "cross-entropy", 1, torch.Generator().manual_seed(7))) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(before, torch.get_rng_state())
