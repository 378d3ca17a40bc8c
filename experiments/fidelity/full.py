r"""Influences in full coordinates from a replay in memory: no row is ever written out, every number is float64.

The adjoint starts with x_θ = ∇ℓ(θ_T, q) and x_m = 0. With the coefficients of each update (see `fidelity_optimizer`), last step first,

    u = x_m − η a P x_θ;   s = (1−τ) u − η n P x_θ
    influence of z at t = −w_z ℓ̇_z
    x_θ ← (1−ηλ') x_θ + H s + λ s;   x_m ← μ u

where ḟ = J s is the outputs' and ℓ̇ the losses' derivative along s, and H s is one of

    exact        Jᵀ w (diag(p) − ppᵀ) ḟ                        all rows of cross-entropy, literal form
    empirical    Σ_z g_z √w_z y_z,   (I + γα √w G P Gᵀ √w) y = √w ℓ̇      γ = 0 literal, 1/(1−μ) implicit;
                 auto: implicit where the step expands, η λ(√w G P Gᵀ √w) > limit
    none         0                                             no propagation, TracIn in the run

at the price of three backward passes a step. Plain SGD has s = −η x_θ.

Assumes: SGD, momentum or AdamW with P as it was in the run; cross-entropy of the model's output; batches (inputs, labels).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call

from backstory.capture import Tap, find_blocks
from backstory.errors import UsageError
from backstory.maths.layers import Contribution, Outer
from backstory.maths.projection import densify
from backstory.replay.recipe import Recipe, take_step, weights
from backstory.replay.tape import in_precision
from experiments.data.images import mean_loss
from experiments.fidelity.updates import Named, Update, coefficients, second_moments

Tell = Callable[[int, int], None]


@dataclass(frozen=True)
class Replay:
    """A recipe trained in float64, with the weights before each of its steps and after the last, and the updates between."""

    recipe: Recipe  # its model is at the final weights
    states: list[Named]  # T + 1
    updates: list[Update]  # T

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
    states, updates = [_state(made)], []
    for t in range(len(made.batches)):
        update = coefficients(made.optimizer)
        take_step(made, t)
        updates.append(update._replace(v=second_moments(made.optimizer, made.model)))
        states.append(_state(made))
    return Replay(made, states, updates)


def influences(
    replay: Replay, curvature: str, *, form: str = "literal", model: str = "aware", tell: Tell | None = None
) -> Tensor:
    """Influences (N,) of all occurrences on the queries' mean loss.

    `curvature` is "exact", "empirical" or "none"; `model` says as what the updates are taken: "aware", "factored" or "proxy".
    """
    total = len(replay.recipe.batches)
    x_theta = _query_gradient(replay)
    x_m = {n: torch.zeros_like(x) for n, x in x_theta.items()}
    result: list[Tensor] = []
    for t in reversed(range(total)):
        k = replay.updates[t].modelled(model)
        P = k.diagonal()
        felt = _times(P, x_theta)
        u = {n: x - k.rate * k.a * felt[n] for n, x in x_m.items()}
        s = {n: (1 - k.tau) * x - k.rate * k.n * felt[n] for n, x in u.items()}
        scores, bent = _back(replay, t, s, curvature, form, k, P)
        x_theta = {n: (1 - k.rate * k.decay) * x + bent[n] + k.l2 * s[n] for n, x in x_theta.items()}
        x_m = {n: k.momentum * x for n, x in u.items()}
        result.insert(0, scores)
        if tell is not None:
            tell(total - t, total)
    replay.load(-1)
    return torch.cat(result)


def _times(P: Named | None, x: Named) -> Named:
    return x if P is None else {n: P[n] * y for n, y in x.items()}


def corrected(replay: Replay, samples: Sequence[int]) -> Tensor:
    """Influence (M,) of removing each sample from all its occurrences, its own curvature missing there too; plain SGD only.

    Forward, exact curvature: x_z ← x_z − η Σ_{b≠z} w_b J_bᵀ(diag(p) − ppᵀ)J_b x_z + η w_z g_z, the last where z occurs.
    """
    if not all(update.plain for update in replay.updates):
        raise UsageError("the correction is worked out for plain SGD; found an optimizer with momentum, decay or P.")
    v = _query_gradient(replay)
    x = {n: torch.zeros(len(samples), *g.shape, dtype=g.dtype) for n, g in v.items()}
    for t in range(len(replay.recipe.batches)):
        x = _forward(replay, t, x, samples)
    return torch.stack([(x[n] * v[n]).flatten(1).sum(1) for n in v]).sum(0)


def _forward(replay: Replay, t: int, x: Named, samples: Sequence[int]) -> Named:
    ids, (inputs, labels) = replay.recipe.batches[t]
    w = weights(replay.recipe, t)  # (B,)
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
    return {n: y - replay.updates[t].rate * b for (n, y), b in zip(x.items(), bent, strict=True)}


def _back(
    replay: Replay, t: int, s: Named, curvature: str, form: str, k: Update, P: Named | None
) -> tuple[Tensor, Named]:
    """One step back: `(influences of its occurrences (B,), H s)`."""
    _, (inputs, labels) = replay.recipe.batches[t]
    w = weights(replay.recipe, t)  # (B,)
    theta = {n: replay.states[t][n].requires_grad_() for n in s}
    f: Tensor = functional_call(replay.recipe.model, theta, (inputs,))  # (B, C)
    along, p = _along(f, list(theta.values()), list(s.values())), f.detach().softmax(1)
    slope = p - torch.nn.functional.one_hot(labels, p.shape[1])  # ∇_f ℓ
    rate = (slope * along).sum(1)  # ℓ̇
    if curvature == "none":
        return -w * rate, {n: torch.zeros_like(x) for n, x in s.items()}
    if curvature == "exact":
        seed = w[:, None] * (p * along - p * (p * along).sum(1, keepdim=True))
    else:
        seed = _met(replay, t, rate, w, form, k, P)[:, None] * slope
    bent = torch.autograd.grad(f, list(theta.values()), seed)
    return -w * rate, dict(zip(s, bent, strict=True))


def _along(f: Tensor, theta: list[Tensor], x: list[Tensor], batched: bool = False) -> Tensor:
    """ḟ = J x, (B, C), or (M, B, C) for M of them: the derivative of u ↦ ⟨Jᵀu, x⟩, which is linear, so any u will do."""
    u = torch.zeros_like(f, requires_grad=True)
    pulled = torch.autograd.grad(f, theta, u, create_graph=True)
    (along,) = torch.autograd.grad(pulled, u, x, retain_graph=True, is_grads_batched=batched)
    return along.detach()


def _met(replay: Replay, t: int, rate: Tensor, w: Tensor, form: str, k: Update, P: Named | None) -> Tensor:
    """√w y, (B,): what the step's rows make of s."""
    if form == "literal":
        return w * rate
    root = w.sqrt()
    M = root[:, None] * _gram(replay, t, P) * root
    if form == "auto" and k.rate * float(torch.linalg.eigvalsh(M)[-1]) <= k.limit:
        return w * rate
    M *= k.alpha / (1 - k.momentum)
    M.diagonal().add_(1)
    solved: Tensor = torch.linalg.solve(M, root * rate)
    return root * solved


def _gram(replay: Replay, t: int, P: Named | None) -> Tensor:
    """G P Gᵀ of the step's gradient rows, (B, B); without P from products of factors, where there is one position."""
    ids, batch = replay.recipe.batches[t]
    K = torch.zeros(len(ids), len(ids), dtype=torch.float64)
    blocks = find_blocks(replay.recipe.model, replay.recipe.optimizer, rank=None)

    def add(slot: int, block: int, part: Contribution, group: int | None) -> None:
        if P is None and isinstance(part, Outer) and part.right.shape[1] == 1:
            left, right = part.left[:, 0], part.right[:, 0]
            K.add_((left @ left.T) * (right @ right.T))
        else:
            rows = densify(part, blocks.blocks[block].shape).flatten(1)
            K.add_((rows if P is None else rows * P[blocks.blocks[block].name].flatten()) @ rows.T)

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


def _state(recipe: Recipe) -> Named:
    return {n: v.detach().clone() for n, v in recipe.model.state_dict().items()}
