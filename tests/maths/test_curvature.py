"""Seeds whose squares are the output Hessian, by autograd's own Hessian and by enumeration."""

import pytest
import torch
import torch.nn.functional as F
from tests.support.oracles import assert_same
from torch import Tensor

from backstory.errors import UnsupportedError, UsageError
from backstory.maths.curvature import check, exact_seeds, n_exact, positions, sampled_seed

D = torch.float64
KINDS = ["cross-entropy", "bce", "squared-error"]


def loss(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """The sum over a sample's loss terms, by torch's own functions."""
    if kind == "cross-entropy":
        return F.cross_entropy(f.reshape(-1, f.shape[-1]), y.reshape(-1), reduction="sum")
    if kind == "bce":
        return F.binary_cross_entropy_with_logits(f, y, reduction="sum")
    return F.mse_loss(f, y, reduction="sum")


def example(kind: str, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    f = torch.randn(shape, generator=g, dtype=D)
    if kind == "cross-entropy":
        return f, torch.randint(0, shape[-1], shape[:-1], generator=g)
    return f, torch.rand(shape, generator=g, dtype=D).round() if kind == "bce" else torch.randn(
        shape, generator=g, dtype=D
    )


def hessian(kind: str, f: Tensor, y: Tensor) -> Tensor:
    """Of one sample's loss with respect to its outputs, (n, n)."""
    n = f.numel()
    actual = torch.autograd.functional.hessian(lambda x: loss(kind, x.reshape(f.shape), y), f.reshape(-1))
    assert isinstance(actual, Tensor)
    return actual.reshape(n, n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_exact_seeds_square_to_the_hessian(kind: str, shape: tuple[int, ...]) -> None:
    f, y = example(kind, shape)
    seeds = torch.stack([s.flatten(1) for s in exact_seeds(f, kind)], 1)  # (B, R, n)
    assert seeds.shape[1] == n_exact(f)
    for b in range(len(f)):
        expected = hessian(kind, f[b : b + 1], y[b : b + 1])
        torch.testing.assert_close(seeds[b].T @ seeds[b], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_seeds_average_to_the_hessian(kind: str) -> None:
    f, y = example(kind, (1, 2, 3))
    g = torch.Generator().manual_seed(1)
    many = f.expand(40_000, -1, -1)
    seeds = sampled_seed(many, kind, g).flatten(1)
    actual, expected = seeds.T @ seeds / len(seeds), hessian(kind, f, y)
    error = (actual - expected).norm() / expected.norm()
    ratio = (actual.diagonal() / expected.diagonal()).median()
    assert error < 0.05, f"off by {error:.2f}; diagonal ratio {ratio:.2f} (2 or 0.5: a factor of the squared error)"


def test_draws_come_from_the_generator_alone() -> None:
    f, _ = example("cross-entropy", (5, 4))
    before = torch.get_rng_state()
    a, b, c = (sampled_seed(f, "cross-entropy", torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert_same(a, b, 2 * 4)  # a softmax of 4 classes
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", KINDS)
def test_masked_positions_have_no_seed_and_are_not_counted(kind: str) -> None:
    f, _ = example(kind, (2, 3, 4))
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    seeds = [sampled_seed(f, kind, torch.Generator().manual_seed(0), mask), *exact_seeds(f, kind, mask)]
    for seed in seeds:
        assert (seed[mask == 0] == 0).all()
    per = 1 if kind == "cross-entropy" else 4
    assert positions(f, kind, mask).tolist() == [2 * per, per]
    assert positions(f, kind, None).tolist() == [3 * per, 3 * per]


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="backward passes per step"):
        next(iter(exact_seeds(torch.zeros(2, 600), "cross-entropy")))
    with pytest.raises(UsageError, match="classes last"):
        check(torch.zeros(3), "cross-entropy", None)
    with pytest.raises(UsageError, match="mask must have shape"):
        check(torch.zeros(2, 3, 4), "cross-entropy", torch.ones(2, 4))
