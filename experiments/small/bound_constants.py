r"""A small net as a function of one vector of weights, and what the bound's constants are made of.

    L_t = max_z ‖∇³ℓ(z; θ_t)‖,    ‖T‖ = max_u |T(u, u, u)|,    u ← T(u, u, ·) / ‖T(u, u, ·)‖

For a symmetric form the largest value is reached at three equal directions; the power iteration finds a local one, so
that L_t is measured from below. Curvature of a step: the Hessian, the Gauss–Newton matrix and the empirical Fisher of
its mean loss.

Assumes: the model's output is all that its cross-entropy sees; batches (inputs, labels).
Shapes:  p weights, B samples in a step, c classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from backstory.errors import UsageError
from backstory.replay.recipe import Recipe

MOST_WEIGHTS = 1500
STARTS, ITERATIONS = 3, 12
PLACES = 5  # between the two ends, where the query's curvature is looked at


@dataclass(frozen=True)
class Flat:
    """The model with its weights laid end to end."""

    model: nn.Module
    shapes: dict[str, torch.Size]
    start: Tensor  # (p,)
    batches: list[tuple[Tensor, Tensor]]
    queries: tuple[Tensor, Tensor]

    def output(self, theta: Tensor, x: Tensor) -> Tensor:
        """Of one input, (c,)."""
        parts = theta.split([shape.numel() for shape in self.shapes.values()])
        named = {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
        found: Tensor = functional_call(self.model, named, (x[None],))[0]
        return found

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of one sample."""
        return F.cross_entropy(self.output(theta, x), y)

    def mean(self, theta: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Over the samples of a batch."""
        return vmap(self.loss, (None, 0, 0))(theta, *batch).mean()

    def gradients(self, theta: Tensor, t: int) -> Tensor:
        """Of each sample of step t, (B, p)."""
        found: Tensor = vmap(grad(self.loss), (None, 0, 0))(theta, *self.batches[t])
        return found

    def steepest(self, theta: Tensor) -> Tensor:
        """The longest gradient of a sample along a run (T + 1, p), each at its own step."""
        return torch.stack([self.gradients(theta[t], t).norm(dim=1).max() for t in range(len(self.batches))]).max()

    def curvatures(self, theta: Tensor, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """`(Hessian, Gauss–Newton matrix, empirical Fisher)` of step t, (p, p) each."""
        x, y = self.batches[t]
        J = vmap(jacrev(self.output), (None, 0))(theta, x)  # (B, c, p)
        p = vmap(self.output, (None, 0))(theta, x).softmax(1)  # (B, c)
        G = J - torch.einsum("bc,bcp->bp", p, J)[:, None]  # rows of the model's own labels
        g = self.gradients(theta, t)
        ggn = torch.einsum("bc,bcp,bcq->pq", p, G, G) / len(y)
        return jacrev(grad(self.mean))(theta, (x, y)), ggn, g.T @ g / len(y)

    def lipschitz(self, theta: Tensor, t: int) -> Tensor:
        """max over the step's samples of ‖∇³ℓ‖ at θ."""
        x, y = self.batches[t]
        g = torch.Generator().manual_seed(t)
        best = torch.zeros(len(y), dtype=theta.dtype)
        for _ in range(STARTS):
            u = torch.randn(len(y), len(theta), generator=g, dtype=theta.dtype)
            u = u / u.norm(dim=1, keepdim=True)
            for _ in range(ITERATIONS):
                turned = self._third(theta, u, x, y)  # (B, p)
                u = turned / turned.norm(dim=1, keepdim=True).clamp_min(1e-300)
            best = torch.maximum(best, (self._third(theta, u, x, y) * u).sum(1).abs())
        return best.max()

    def _third(self, theta: Tensor, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """T_z(u_z, u_z, ·) = ∇ ⟨u, H_z u⟩ of each sample, (B, p)."""

        def slope(theta: Tensor, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = grad(self.loss)(theta, x, y) @ u
            return found

        def bend(theta: Tensor, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = grad(slope)(theta, u, x, y) @ u
            return found

        found: Tensor = vmap(grad(bend), (None, 0, 0, 0))(theta, u, x, y)
        return found

    def query(self, theta: Tensor) -> Tensor:
        """The mean loss of the queries."""
        return self.mean(theta, self.queries)

    def query_gradient(self, theta: Tensor) -> Tensor:
        """∇ of it, (p,)."""
        found: Tensor = grad(self.query)(theta)
        return found

    def query_bend(self, theta: Tensor, other: Tensor) -> float:
        """The largest norm of the query's Hessian between two points, at a few places."""
        places = torch.linspace(0, 1, PLACES, dtype=theta.dtype)
        H = [jacrev(grad(self.query))(theta + r * (other - theta)) for r in places]
        return float(torch.linalg.matrix_norm(torch.stack(H), 2).max())


def flat(plan: Recipe) -> Flat:
    """The recipe's model and data, if the model is small enough for its Hessian."""
    named = dict(plan.model.named_parameters())
    start = torch.cat([p.detach().reshape(-1) for p in named.values()]).double()
    if len(start) > MOST_WEIGHTS:
        raise UsageError(
            f"found {len(start):,} weights; expected at most {MOST_WEIGHTS:,}: every Hessian is kept whole."
        )
    batches = [batch for _, batch in plan.batches]
    return Flat(plan.model, {n: p.shape for n, p in named.items()}, start, batches, plan.queries["test"])
