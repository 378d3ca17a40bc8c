"""Scores from a replay against tangents carried forward by dense matrices, along the steps of torch's own AdamW."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from experiments.gpt.methods import methods
from experiments.gpt.replayed import sweep
from tests.experiments.gpt.test_setups import without_network
from tests.support.oracles import assert_same
from torch import Tensor, nn
from torch.func import functional_call

from backstory.demo.gpt_model import GPT, counts, loss
from backstory.replay.recipe import Recipe

text = pytest.fixture(autouse=True)(without_network)

V, S, B, STEPS, LIMIT = 5, 4, 2, 5, 4.0
BETA1, BETA2, DECAY, RATE = 0.9, 0.95, 0.1, 0.02
Dense = Callable[[Tensor, Tensor], Tensor]  # (θ, tokens) -> (p, p)


def tokens() -> Tensor:
    return torch.randint(V, (STEPS, B, S + 1), generator=torch.Generator().manual_seed(0))


def queries() -> Tensor:
    return torch.randint(V, (3, S + 1), generator=torch.Generator().manual_seed(1))


def plan() -> Recipe:
    torch.manual_seed(2)
    model = GPT(vocabulary=V, length=S, layers=1, width=4, heads=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(BETA1, BETA2), weight_decay=DECAY)
    batches = [([f"{t}-{b}" for b in range(B)], x) for t, x in enumerate(tokens())]
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=batches, loss_reduction="token-mean", tokens=counts,
        clip_norm=LIMIT,
    )  # fmt: skip


class Functional:
    """The model as a function of one flat vector."""

    def __init__(self) -> None:
        self.model = plan().model.double()
        self.names = [(n, p.shape, p.numel()) for n, p in self.model.named_parameters()]

    def logits(self, theta: Tensor, batch: Tensor) -> Tensor:
        parts = theta.split([size for _, _, size in self.names])
        named = {n: part.reshape(shape) for (n, shape, _), part in zip(self.names, parts, strict=True)}
        with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
            return functional_call(self.model, named, (batch[:, :-1],))  # type: ignore[no-any-return]

    def sums(self, theta: Tensor, batch: Tensor) -> Tensor:
        """Of each sequence's tokens, (B,)."""
        logs = self.logits(theta, batch).log_softmax(-1)
        return -logs.gather(2, batch[:, 1:, None]).sum((1, 2))

    def total(self, theta: Tensor, batch: Tensor) -> Tensor:
        return self.sums(theta, batch).sum() / (B * S)

    def none(self, theta: Tensor, batch: Tensor) -> Tensor:
        return torch.zeros(len(theta), len(theta), dtype=torch.float64)

    def hessian(self, theta: Tensor, batch: Tensor) -> Tensor:
        return torch.autograd.functional.hessian(lambda x: self.total(x, batch), theta)  # type: ignore[no-any-return]

    def exact(self, theta: Tensor, batch: Tensor) -> Tensor:
        """Σ over the tokens of Jᵀ (diag(p) − ppᵀ) J / tokens."""
        J = torch.autograd.functional.jacobian(lambda x: self.logits(x, batch).reshape(-1, V), theta)
        out = torch.zeros(len(theta), len(theta), dtype=torch.float64)
        for position, p in zip(J, self.logits(theta, batch).reshape(-1, V).softmax(-1), strict=True):
            out += position.T @ (torch.diag(p) - torch.outer(p, p)) @ position / (B * S)
        return out


def trained(net: Functional) -> tuple[list[Tensor], list[Tensor]]:
    """`(θ before each step and after the last, v̂ after each)` of torch's own steps, float64."""
    optimizer = torch.optim.AdamW(net.model.parameters(), lr=RATE, betas=(BETA1, BETA2), weight_decay=DECAY)
    flat = [nn.utils.parameters_to_vector(net.model.parameters()).detach().clone()]
    second = []
    for t, batch in enumerate(tokens()):
        optimizer.zero_grad()
        (loss(net.model, batch).sum() / (B * S)).backward()
        nn.utils.clip_grad_norm_(net.model.parameters(), LIMIT)
        optimizer.step()
        state = [optimizer.state[p]["exp_avg_sq"] for p in net.model.parameters()]
        second.append(nn.utils.parameters_to_vector(state) / (1 - BETA2 ** (t + 1)))
        flat.append(nn.utils.parameters_to_vector(net.model.parameters()).detach().clone())
    return flat, second


def shorten(g: Tensor) -> Tensor:
    return g * torch.clamp(LIMIT / (g.norm() + 1e-6), max=1.0)


def tangents(curvature: str) -> tuple[Tensor, list[float]]:
    """Influences (N, 3), each by its own displacement from its step to the end; and the norms before clipping."""
    net = Functional()
    flat, second = trained(net)
    dense: Dense = getattr(net, curvature)
    ends = torch.autograd.functional.jacobian(lambda x: net.sums(x, queries()) / S, flat[-1])  # (3, p)
    shift = torch.zeros(STEPS * B, len(flat[0]), dtype=torch.float64)
    moment, norms = torch.zeros_like(shift), []
    for t, batch in enumerate(tokens()):
        slopes = torch.autograd.functional.jacobian(lambda x, b=batch: net.sums(x, b), flat[t]) / (B * S)  # (B, p)
        change = shift @ dense(flat[t], batch)
        change[t * B : (t + 1) * B] -= slopes
        norms.append(float(slopes.sum(0).norm()))
        clip = torch.autograd.functional.jacobian(shorten, slopes.sum(0))
        moment = BETA1 * moment + (1 - BETA1) * change @ clip.T
        P = 1 / (second[t].sqrt() + 1e-8)
        shift = (1 - RATE * DECAY) * shift - RATE * P * moment / (1 - BETA1 ** (t + 1))
    return shift @ ends.T, norms


def of_queries(model: nn.Module) -> Tensor:
    return loss(model, queries()) / S


@pytest.mark.parametrize("curvature", ["none", "exact", "hessian"])
def test_scores_are_those_of_displacements_carried_forward(curvature: Any) -> None:
    expected, norms = tangents(curvature)
    assert min(norms) < LIMIT < max(norms), "clipping must act in some steps and not in others"
    actual = sweep(plan, of_queries, curvature, dtype=torch.float64)
    assert actual.shape == (STEPS * B, 3)
    assert_same(actual, expected, 10_000, dtype=torch.float64)


def test_the_three_curvatures_differ() -> None:
    none, exact, hessian = (sweep(plan, of_queries, c, dtype=torch.float64) for c in ("none", "exact", "hessian"))
    assert torch.equal(none[-B:], exact[-B:]), "nothing comes after the last step"
    assert not torch.allclose(none[:B], exact[:B], rtol=1e-2)
    assert not torch.allclose(exact[:B], hessian[:B], rtol=1e-2)


def test_the_rows_are_only_run_where_they_are_named() -> None:
    assert {m.name for m in methods() if not m.default} == {"no-curvature", "full-exact", "full-hessian"}
