r"""Influences in full coordinates from a replay in memory: no row is ever written out, every number is float64.

With ḟ = J x the outputs' and ℓ̇ the losses' derivative along the adjoint x, plain SGD's adjoint is

    influence of z at t = η w_z ℓ̇_z
    exact        x ← x − η Jᵀ w (diag(p) − ppᵀ) ḟ              all rows of cross-entropy, literal form
    empirical    x ← x − η Σ_z g_z √w_z y_z,   (I + γη √w GGᵀ √w) y = √w ℓ̇        γ = 0 literal, 1 implicit;
                 auto: implicit where the step expands, η λ(√w GGᵀ √w) > 2
    none         x ← x                                         no propagation, TracIn in the run

at the price of three backward passes a step. It is the adjoint of `maths` with these rows.

Assumes: plain SGD; cross-entropy of the model's output; batches (inputs, labels).
Knows nothing of runs on disk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from ..capture import Tap, find_blocks
from ..maths.layers import Contribution, Outer
from ..maths.subspace import densify
from ..session.recipe import Recipe, take_step, weights
from ..truth.precision import in_precision
from .fidelity_setups import mean_loss

Tell = Callable[[int, int], None]
Named = dict[str, Tensor]


@dataclass(frozen=True)
class Replay:
    """A recipe trained in float64, with the weights before each of its steps and after the last."""

    recipe: Recipe  # its model is at the final weights
    states: list[dict[str, Tensor]]  # T + 1
    rate: float

    @property
    def occurrences(self) -> int:
        """Of all samples, in all steps."""
        return sum(len(ids) for ids, _ in self.recipe.batches)

    @property
    def width(self) -> int:
        """Parameters."""
        return sum(p.numel() for p in self.recipe.model.parameters())

    def load(self, t: int) -> None:
        """Put the weights of step t into the model."""
        self.recipe.model.load_state_dict(self.states[t])


def replayed(recipe: Recipe) -> Replay:
    """Train the recipe in float64 and keep every state."""
    made = in_precision(recipe, torch.float64)
    states = [_state(made)]
    for t in range(len(made.batches)):
        take_step(made, t)
        states.append(_state(made))
    return Replay(made, states, float(made.optimizer.param_groups[0]["lr"]))


def influences(replay: Replay, curvature: str, *, form: str = "literal", tell: Tell | None = None) -> Tensor:
    """Influences (N,) of all occurrences on the queries' mean loss; `curvature` is "exact", "empirical" or "none"."""
    total = len(replay.recipe.batches)
    x = _query_gradient(replay)
    found: list[Tensor] = []
    for t in reversed(range(total)):
        scores, x = _back(replay, t, x, curvature, form)
        found.insert(0, scores)
        if tell is not None:
            tell(total - t, total)
    replay.load(-1)
    return torch.cat(found)


def corrected(replay: Replay, samples: Sequence[int]) -> Tensor:
    """Influence (M,) of removing each sample from all its occurrences, its own curvature missing there too.

    Forward, exact curvature: x_z ← x_z − η Σ_{b≠z} w_b J_bᵀ(diag(p) − ppᵀ)J_b x_z + η w_z g_z, the last where z occurs.
    """
    v = _query_gradient(replay)
    x = {n: torch.zeros(len(samples), *g.shape, dtype=g.dtype) for n, g in v.items()}
    for t in range(len(replay.recipe.batches)):
        x = _forward(replay, t, x, samples)
    return torch.stack([(x[n] * v[n]).flatten(1).sum(1) for n in v]).sum(0)


def _forward(replay: Replay, t: int, x: Named, samples: Sequence[int]) -> Named:
    ids, (inputs, labels) = replay.recipe.batches[t]
    w = weights(replay.recipe, len(ids))  # (B,)
    theta = {n: replay.states[t][n].requires_grad_() for n in x}
    f: Tensor = functional_call(replay.recipe.model, theta, (inputs,))  # (B, C)
    along, p = _along(f, list(theta.values()), list(x.values()), batched=True), f.detach().softmax(1)  # (M, B, C)
    seed = w[:, None] * (p * along - p * (p * along).sum(2, keepdim=True))
    slope = p - torch.nn.functional.one_hot(labels, p.shape[1])
    place = {name: b for b, name in enumerate(ids)}
    for m, sample in enumerate(samples):
        if sample in place:
            seed[m, place[sample]] = -w[place[sample]] * slope[place[sample]]
    bent = torch.autograd.grad(f, list(theta.values()), seed, is_grads_batched=True)
    return {n: y - replay.rate * b for (n, y), b in zip(x.items(), bent, strict=True)}


def _back(replay: Replay, t: int, x: Named, curvature: str, form: str) -> tuple[Tensor, Named]:
    """One step back: `(influences of its occurrences (B,), the adjoint before it)`."""
    ids, (inputs, labels) = replay.recipe.batches[t]
    w = weights(replay.recipe, len(ids))  # (B,)
    theta = {n: replay.states[t][n].requires_grad_() for n in x}
    f: Tensor = functional_call(replay.recipe.model, theta, (inputs,))  # (B, C)
    along, p = _along(f, list(theta.values()), list(x.values())), f.detach().softmax(1)
    slope = p - torch.nn.functional.one_hot(labels, p.shape[1])  # ∇_f ℓ
    rate = (slope * along).sum(1)  # ℓ̇
    scores = replay.rate * w * rate
    if curvature == "none":
        return scores, x
    if curvature == "exact":
        seed = w[:, None] * (p * along - p * (p * along).sum(1, keepdim=True))
    else:
        seed = _met(replay, t, rate, w, form)[:, None] * slope
    bent = torch.autograd.grad(f, list(theta.values()), seed)
    return scores, {n: y - replay.rate * b for (n, y), b in zip(x.items(), bent, strict=True)}


def _along(f: Tensor, theta: list[Tensor], x: list[Tensor], batched: bool = False) -> Tensor:
    """ḟ = J x, (B, C), or (M, B, C) for M of them: the derivative of u ↦ ⟨Jᵀu, x⟩, which is linear, so any u will do."""
    u = torch.zeros_like(f, requires_grad=True)
    pulled = torch.autograd.grad(f, theta, u, create_graph=True)
    (along,) = torch.autograd.grad(pulled, u, x, retain_graph=True, is_grads_batched=batched)
    return along.detach()


def _met(replay: Replay, t: int, rate: Tensor, w: Tensor, form: str) -> Tensor:
    """√w y, (B,): what the step's rows make of the adjoint."""
    if form == "literal":
        return w * rate
    root = w.sqrt()
    M = replay.rate * root[:, None] * _gram(replay, t) * root
    if form == "auto" and float(torch.linalg.eigvalsh(M)[-1]) <= 2:
        return w * rate
    M.diagonal().add_(1)
    solved: Tensor = torch.linalg.solve(M, root * rate)
    return root * solved


def _gram(replay: Replay, t: int) -> Tensor:
    """GGᵀ of the step's gradient rows, (B, B): the products of factors, where there is one position."""
    ids, batch = replay.recipe.batches[t]
    K = torch.zeros(len(ids), len(ids), dtype=torch.float64)
    blocks = find_blocks(replay.recipe.model, replay.recipe.optimizer, rank=None)

    def add(slot: int, block: int, part: Contribution) -> None:
        if isinstance(part, Outer) and part.right.shape[1] == 1:
            left, right = part.left[:, 0], part.right[:, 0]
            K.add_((left @ left.T) * (right @ right.T))
        else:
            rows = densify(part, blocks.blocks[block].shape).flatten(1)
            K.add_(rows @ rows.T)

    replay.load(t)
    tap = Tap(replay.recipe.model, blocks, add)
    tap.attach()
    try:
        tap.batch(len(ids))
        losses = replay.recipe.loss(replay.recipe.model, batch)
        torch.autograd.grad(losses.sum(), list(replay.recipe.model.parameters()))
    finally:
        tap.detach()
    return K


def _query_gradient(replay: Replay) -> Named:
    replay.load(-1)
    parameters = dict(replay.recipe.model.named_parameters())
    asked = mean_loss(replay.recipe.model, replay.recipe.queries["test"])
    return dict(zip(parameters, torch.autograd.grad(asked, list(parameters.values())), strict=True))


def _state(recipe: Recipe) -> dict[str, Tensor]:
    return {n: v.detach().clone() for n, v in recipe.model.state_dict().items()}
