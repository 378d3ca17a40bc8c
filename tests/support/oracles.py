r"""Slow truth in float64, written from `torch.optim`, `clip_grad_norm_` and autograd alone.

`Run` is a whole training run on quadratics ℓ_z(θ) = ½ Σ_r (h_r·θ − b_r)², whose Hessian Σ h hᵀ is known;
`train` steps torch's own optimizer through it, and embeddings come out of finite differences or of retraining.
`train_adam` does the same with Adam, whose second moments can be held at those of another run.
`unrolled` differentiates, by autograd, the step that the recorded numbers stand for.

Shares no code with `backstory`: nothing here imports it, and nothing is taken from its formulas.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

DIFFERENCE = 2e-3  # with the five-point rule the error is about DIFFERENCE⁴ = 2e-11, the rounding 1e-13


class Visit(NamedTuple):
    """What an observer sees at one step, before the update."""

    grads: Tensor  # (B, p) of each sample's loss, one backward each
    gradient: Tensor  # (p,) of the step's loss
    norm: float
    clip: float  # what torch multiplied the gradient by


@dataclass(frozen=True, kw_only=True)
class Group:
    """A parameter group: its share of θ, and what torch's optimizer is told at each step."""

    size: int
    settings: Sequence[Mapping[str, Any]]  # lr, momentum, weight_decay and so on: one for each step
    decay: float = 0.0  # decoupled: by hand, θ ← (1 − lr·decay) θ before the optimizer's step


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides θ_T."""

    h: Tensor  # (N, R, p)
    b: Tensor  # (N, R)
    start: Tensor  # (p,)
    batches: Sequence[Sequence[int]]
    weights: Sequence[Tensor]  # (B,) of each step
    groups: Sequence[Group]
    max_norm: float | None = None

    def loss(self, theta: Tensor, z: int) -> Tensor:
        """ℓ_z(θ)."""
        return 0.5 * (self.h[z] @ theta - self.b[z]).square().sum()


def train(run: Run, watch: Callable[[Visit], None] | None = None) -> Tensor:
    """θ_T, by torch's optimizer and torch's clipping."""
    blocks = [nn.Parameter(x.clone()) for x in run.start.split([g.size for g in run.groups])]
    optimizer = torch.optim.SGD([{"params": [x]} for x in blocks], lr=1.0)
    for t, (batch, w) in enumerate(zip(run.batches, run.weights, strict=True)):
        for place, group in zip(optimizer.param_groups, run.groups, strict=True):
            place.update(group.settings[t])
        optimizer.zero_grad()
        theta = torch.cat(list(blocks))
        torch.stack([w[i] * run.loss(theta, z) for i, z in enumerate(batch)]).sum().backward()
        before = _gradient(blocks)
        if run.max_norm is not None:
            nn.utils.clip_grad_norm_(blocks, run.max_norm)
        if watch is not None:
            watch(_visit(run, theta.detach(), batch, before, _gradient(blocks)))
        with torch.no_grad():
            for x, group in zip(blocks, run.groups, strict=True):
                x.mul_(1 - group.settings[t]["lr"] * group.decay)
        optimizer.step()
    return torch.cat(list(blocks)).detach()


Seconds = list[dict[str, Tensor]]  # Adam's exp_avg_sq, and with amsgrad its maximum, of each group


def train_adam(
    run: Run,
    adam: type[torch.optim.Adam],
    held: Sequence[Seconds] | None = None,
    watch: Callable[[Visit], None] | None = None,
) -> tuple[Tensor, list[Seconds]]:
    """θ_T and the second moments after each step; `held`, those of another run, take the place of its own."""
    blocks = [nn.Parameter(x.clone()) for x in run.start.split([g.size for g in run.groups])]
    optimizer = adam([{"params": [x], **group.settings[0]} for x, group in zip(blocks, run.groups, strict=True)])
    seconds: list[Seconds] = []
    for t, (batch, w) in enumerate(zip(run.batches, run.weights, strict=True)):
        for place, group in zip(optimizer.param_groups, run.groups, strict=True):
            place.update(group.settings[t])
        optimizer.zero_grad()
        theta = torch.cat(list(blocks))
        torch.stack([w[i] * run.loss(theta, z) for i, z in enumerate(batch)]).sum().backward()
        before = _gradient(blocks)
        if run.max_norm is not None:
            nn.utils.clip_grad_norm_(blocks, run.max_norm)
        if watch is not None:
            watch(_visit(run, theta.detach(), batch, before, _gradient(blocks)))
        for i in range(len(blocks) if held is not None else 0):
            assert held is not None
            _hold(optimizer, optimizer.param_groups[i], held[t][i])
        optimizer.step()
        states = [optimizer.state[x] for x in blocks]
        seconds.append([{n: x.clone() for n, x in state.items() if n.endswith("exp_avg_sq")} for state in states])
    return torch.cat(list(blocks)).detach(), seconds


def _hold(optimizer: torch.optim.Adam, place: dict[str, Any], wanted: Mapping[str, Tensor]) -> None:
    """Choose v such that β₂ v + (1−β₂) g², torch's own next line, gives what is wanted, whatever g is."""
    (x,) = place["params"]
    state, beta = optimizer.state[x], place["betas"][1]
    if not state:
        state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(x))
    inside = 0.0 if place["decoupled_weight_decay"] else place["weight_decay"]
    g = x.grad + inside * x.detach()
    state["exp_avg_sq"] = (wanted["exp_avg_sq"] - (1 - beta) * g * g) / beta
    if place["amsgrad"]:
        state["max_exp_avg_sq"] = wanted["max_exp_avg_sq"].clone()  # at least the wanted v, so it stays


def observe(run: Run) -> list[Visit]:
    """The visits of all steps."""
    visits: list[Visit] = []
    train(run, visits.append)
    return visits


def reweighted(run: Run, t: int, i: int, factor: float) -> Run:
    """The same run with the weight of occurrence `i` of step `t` multiplied by `factor`; 0 removes it."""
    weights = [w.clone() for w in run.weights]
    weights[t][i] *= factor
    return replace(run, weights=weights)


def difference_embeddings(run: Run, end: Callable[[Run], Tensor] = train) -> list[Tensor]:
    """∂θ_T/∂ε for w → (1−ε) w of every occurrence, by central differences of whole runs: (B, p) per step."""

    def one(t: int, i: int) -> Tensor:
        at = [end(reweighted(run, t, i, 1 - k * DIFFERENCE)) for k in (-2, -1, 1, 2)]
        return (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * DIFFERENCE)

    return [torch.stack([one(t, i) for i in range(len(batch))]) for t, batch in enumerate(run.batches)]


def _gradient(blocks: Sequence[nn.Parameter]) -> Tensor:
    grads = [x.grad for x in blocks if x.grad is not None]
    assert len(grads) == len(blocks)
    return torch.cat(grads)


def _visit(run: Run, theta: Tensor, batch: Sequence[int], before: Tensor, after: Tensor) -> Visit:
    theta = theta.requires_grad_()
    grads = torch.stack([torch.autograd.grad(run.loss(theta, z), theta)[0] for z in batch])
    norm = before.norm().item()
    return Visit(grads, before, norm, 1.0 if torch.equal(before, after) else after.norm().item() / norm)


class Recorded(NamedTuple):
    """The numbers of one step with no meaning but their own: `unrolled` gives them one."""

    G: Tensor  # (B, p)
    w: Tensor  # (B,)
    H: Tensor  # (p, p)
    max_norm: float  # inf: not clipped
    rate: Tensor  # all (p,) from here
    l2: Tensor
    decay: Tensor
    momentum: Tensor
    tau: Tensor
    a: Tensor
    n: Tensor
    P: Tensor  # the optimizer's diagonal


def unrolled(steps: Sequence[Recorded]) -> tuple[list[Tensor], Tensor]:
    """Embeddings (B, p) of each step and ∂θ_T/∂θ_0, by autograd through θ and m from the first step to the last.

    The step's gradient is Σ w g + H (θ − θ_t) with θ_t = 0: only derivatives matter. It is clipped as torch does.
    """
    p = steps[0].G.shape[1]
    weights = [s.w.clone().requires_grad_() for s in steps]
    start = torch.zeros(p, dtype=torch.float64, requires_grad=True)
    theta, m = start, torch.zeros(p, dtype=torch.float64)
    for s, w in zip(steps, weights, strict=True):
        origin = theta.detach()
        gradient = w @ s.G + s.H @ (theta - origin)
        scale = torch.clamp(s.max_norm / (gradient.norm() + 1e-6), max=1.0)  # as in clip_grad_norm_'s source
        u = scale * gradient + s.l2 * theta
        m = s.momentum * m + (1 - s.tau) * u
        theta = (1 - s.rate * s.decay) * theta - s.rate * s.P * (s.a * m + s.n * u)
    wanted = [*weights, start]
    rows = [torch.autograd.grad(theta[k], wanted, retain_graph=True) for k in range(p)]
    columns = [torch.stack(list(entry), dim=-1) for entry in zip(*rows, strict=True)]  # (B, p) each
    return [-w.detach()[:, None] * c for w, c in zip(weights, columns, strict=False)], columns[-1].T


def algorithm_1(grads: Sequence[Tensor], rates: Sequence[float]) -> tuple[list[Tensor], Tensor]:
    """The paper's Algorithm 1, line by line: `(embeddings, M)`; its loss is a sum, so no weights.

    Its guard "if t > 0" is left out, as M of the first step is what carries a displacement over the whole run.
    """
    p = grads[0].shape[1]
    M = torch.zeros(p, p, dtype=torch.float64)
    embeddings: list[Tensor] = []
    for t in range(len(grads) - 1, -1, -1):
        of_step = [rates[t] * g - rates[t] * M @ g for g in grads[t]]
        M = M + torch.stack([torch.outer(e, g) for e, g in zip(of_step, grads[t], strict=True)]).sum(0)
        embeddings.insert(0, torch.stack(of_step))
    return embeddings, M


def expands(settings: Sequence[Mapping[str, Any]], V: Tensor, count: int = 1500) -> bool:
    """Whether `torch.optim.SGD`, one group per coordinate, runs away on ½‖Vθ‖²."""
    blocks = [nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in settings]
    optimizer = torch.optim.SGD([{"params": [x], **s} for x, s in zip(blocks, settings, strict=True)])
    for _ in range(count):
        optimizer.zero_grad()
        (0.5 * (V @ torch.cat(list(blocks))).square().sum()).backward()
        optimizer.step()
        size = torch.cat([x.detach() for x in blocks]).norm().item()
        if size > 1e3:
            return True
    return False


def per_sample_gradients(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> dict[str, Tensor]:
    """Parameter name -> (B, *shape): one forward and one backward pass for each sample."""
    out: dict[str, list[Tensor]] = {name: [] for name, _ in module.named_parameters()}
    for i in range(len(delta)):
        module.zero_grad()
        module(*(x[i : i + 1] for x in inputs)).backward(delta[i : i + 1])
        for name, value in module.named_parameters():
            out[name].append(torch.zeros_like(value) if value.grad is None else value.grad.clone())
    return {name: torch.stack(grads) for name, grads in out.items()}


def assert_close(actual: Tensor, expected: Tensor, rtol: float, causes: str = "") -> None:
    """Row by row, ‖actual − expected‖ ≤ rtol ‖expected‖; rows under a thousandth of the largest count as that."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    a, b = (torch.atleast_2d(x.detach().double()).flatten(1) for x in (actual, expected))
    norms = b.norm(dim=1)
    error = (a - b).norm(dim=1) / norms.clamp(min=max(1e-3 * norms.max().item(), 1e-300))
    large = b.abs() > 1e-6 * b.abs().max()
    ratio = (a[large] / b[large]).median().item() if large.any() else float("nan")
    assert error.max().item() <= rtol, (
        f"largest relative error {error.max().item():.2e} in row {error.argmax().item()} of {len(error)} "
        f"(allowed {rtol:.0e}); median of actual/expected {ratio:.6f}. {causes}"
    )


def assert_same(
    actual: Tensor, expected: Tensor, terms: int, *, size: float | None = None, dtype: torch.dtype | None = None
) -> None:
    """Two computations of the same numbers: |actual − expected| ≤ terms × unit roundoff × size of the terms.

    `terms` is the length of the sums behind one number, from the first input on: of a product its inner dimension, of
    a training run the inner dimensions of all its steps. `size` is how large the terms are where they cancel; without it,
    the largest result. `dtype` is that of the arithmetic, where the numbers were widened afterwards.
    """
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    unit = torch.finfo(dtype or (expected.dtype if expected.is_floating_point() else torch.float64)).eps / 2
    a, b = actual.detach().double(), expected.detach().double()
    largest = b.abs().max().item() if b.numel() else 0.0
    allowed = terms * unit * (largest if size is None else size)
    error = (a - b).abs().max().item() if b.numel() else 0.0
    assert error <= allowed, (
        f"they differ by {error:.1e}, and rounding explains {allowed:.1e} (largest number {largest:.1e}). A little more "
        "means that `terms` is too short; much more, that something else was computed."
    )
