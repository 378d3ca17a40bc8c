r"""The study of the paper's error bound, with every constant measured on one run of a small smooth net.

The theorem (appendix on the error guarantee), with rates η_t = C/√(T t), t = 1 … T, for exact unrolling Δ:

    ‖(θ'_T − θ_T) − Δ‖  ≤  32/3 · G² C³ L e^{CΛ}              one number for all removals
    G ≥ ‖∇ℓ(z; θ)‖,   L: Lipschitz constant of ∇²ℓ(z; θ),   Λ ≥ √t ‖H_t‖

and the same chain of its proof before anything is replaced by its largest value, for each removal:

    ‖(θ'_T − θ_T) − Δ‖  ≤  Σ_s ρ_s η_s L_s d_s²,     ρ_s = ∏_{k>s} ‖I − η_k H_k‖,   d_s = ‖θ'_s − θ_s‖

The theorem knows nothing of curvature other than the Hessian. For an embedding Δ̂ with curvature F the same chain gives

    ‖Δ̂ − Δ‖  ≤  Σ_s ρ_s η_s ‖H_s − F_s‖ ‖Δ̂_s‖               ours, not the paper's

and a distance r of weights becomes one of losses by |error| ≤ ‖∇ℓ(q)‖ r + ½ M d_T², M ≥ ‖∇²ℓ(q)‖ between θ_T and θ'_T.

Suprema are measured where the runs went, so each constant is at most the theorem's. Losses are means over a batch, hence
the constants of single samples bound those of a step.
Assumes: plain SGD; one removed occurrence; a net so small that its Hessian fits.

A small net as a function of one vector of weights, and what the bound's constants are made of.

    L_t = max_z ‖∇³ℓ(z; θ_t)‖,    ‖T‖ = max_u |T(u, u, u)|,    u ← T(u, u, ·) / ‖T(u, u, ·)‖

For a symmetric form the largest value is reached at three equal directions; the power iteration finds a local one, so
that L_t is measured from below. Curvature of a step: the Hessian, the Gauss–Newton matrix and the empirical Fisher of
its mean loss.

Assumes: the model's output is all that its cross-entropy sees; batches (inputs, labels).
Shapes:  p weights, B samples in a step, c classes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, jacrev, vmap

from backstory.errors import UsageError
from backstory.replay.recipe import Recipe
from backstory.replay.tape import in_precision
from experiments.data.images import Setup, generator, recipe
from experiments.harness import Say

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
        result: Tensor = functional_call(self.model, named, (x[None],))[0]
        return result

    def loss(self, theta: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Of one sample."""
        return F.cross_entropy(self.output(theta, x), y)

    def mean(self, theta: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Over the samples of a batch."""
        return vmap(self.loss, (None, 0, 0))(theta, *batch).mean()

    def gradients(self, theta: Tensor, t: int) -> Tensor:
        """Of each sample of step t, (B, p)."""
        result: Tensor = vmap(grad(self.loss), (None, 0, 0))(theta, *self.batches[t])
        return result

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
            result: Tensor = grad(self.loss)(theta, x, y) @ u
            return result

        def bend(theta: Tensor, u: Tensor, x: Tensor, y: Tensor) -> Tensor:
            result: Tensor = grad(slope)(theta, u, x, y) @ u
            return result

        result: Tensor = vmap(grad(bend), (None, 0, 0, 0))(theta, u, x, y)
        return result

    def query(self, theta: Tensor) -> Tensor:
        """The mean loss of the queries."""
        return self.mean(theta, self.queries)

    def query_gradient(self, theta: Tensor) -> Tensor:
        """∇ of it, (p,)."""
        result: Tensor = grad(self.query)(theta)
        return result

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
            f"the model may have at most {MOST_WEIGHTS:,} weights, because full Hessians are kept, got {len(start):,}."
        )
    batches = [batch for _, batch in plan.batches]
    return Flat(plan.model, {n: p.shape for n, p in named.items()}, start, batches, plan.queries["test"])


CURVATURES = ("hessian", "ggn", "empirical")  # exact unrolling, and the embedding with either


@dataclass(frozen=True)
class Run:
    """The run itself, measured; index s is the theorem's t − 1."""

    net: Flat
    theta: Tensor  # (T + 1, p)
    rates: Tensor  # (T,)
    curvature: dict[str, Tensor]  # (T, p, p) each
    growth: Tensor  # (T,) ρ_s
    lipschitz: Tensor  # (T,) of a sample's Hessian, the largest of the step


@dataclass(frozen=True)
class Constants:
    """What the theorem names, measured along the run."""

    T: int
    parameters: int
    C: float
    G: float
    L: float
    Lambda: float
    theorem: float  # 32/3 G² C³ L e^{CΛ}, a distance of weights
    proof: float  # the same with the proof's own exponent CΛ ln T / √T
    growth: float  # the largest ρ_s: how far an error can grow until the end, at most
    deviation: dict[str, float]  # mean over the steps of ‖H − F‖ / ‖H‖


def scheduled(setup: Setup, seed: int, C: float) -> Recipe:
    """The set-up's run in float64 with the theorem's rates C/√(T t)."""
    made = in_precision(recipe(setup, seed), torch.float64)
    T = len(made.batches)
    optimizer = torch.optim.SGD(made.model.parameters(), lr=C / T**0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (t + 1) ** -0.5)
    return replace(made, optimizer=optimizer, schedule=schedule)


def study(setup: Setup, seed: int = 0, *, C: float = 2.0, count: int = 12, say: Say | None = None) -> dict[str, Any]:
    """Constants, and for each removal errors and bounds, as plain values."""
    plan = scheduled(setup, seed, C)
    occurrences = [(t, i) for t, (ids, _) in enumerate(list(plan.batches)[:-1]) for i in range(len(ids))]
    if not 1 <= count <= len(occurrences) or C <= 0:
        raise UsageError(f"removals must be between 1 and {len(occurrences)}, and C above 0, got {count} and {C}.")
    run = measured(plan, C, say)
    chosen = torch.randperm(len(occurrences), generator=generator(seed, "bound"))[:count].tolist()
    rows, steepest = [], float(run.net.steepest(run.theta))
    for done, (t, i) in enumerate(sorted(occurrences[k] for k in chosen)):
        row, without = removal(run, t, i)
        rows.append({"sample": plan.batches[t][0][i], **row})
        steepest = max(steepest, float(run.net.steepest(without)))
        if say is not None:
            say("removals", done + 1, count)
    constants = _constants(run, C, steepest)
    return {
        "setup": asdict(setup),
        "seed": seed,
        "constants": asdict(constants),
        "rows": rows,
        **_verdict(constants, rows),
    }


def measured(plan: Recipe, C: float, say: Say | None = None) -> Run:
    """Train once; curvature matrices and Lipschitz constants at every step."""
    net, T = flat(plan), len(plan.batches)
    rates = C / (T * torch.arange(1, T + 1, dtype=torch.float64)).sqrt()
    theta, result = [net.start], []
    for t in range(T):
        result.append((*net.curvatures(theta[t], t), net.lipschitz(theta[t], t)))
        theta.append(theta[t] - rates[t] * net.gradients(theta[t], t).mean(0))
        if say is not None:
            say("constants along the run", t + 1, T)
    matrices = {name: torch.stack([step[k] for step in result]) for k, name in enumerate(CURVATURES)}
    step = torch.eye(len(net.start), dtype=torch.float64) - rates[:, None, None] * matrices["hessian"]
    norms = torch.linalg.matrix_norm(step, 2)  # (T,) ‖Z_k‖
    growth = torch.cat([norms.flip(0).cumprod(0).flip(0)[1:], norms.new_ones(1)])
    return Run(net, torch.stack(theta), rates, matrices, growth, torch.stack([step[3] for step in result]))


def removal(run: Run, at: int, position: int) -> tuple[dict[str, Any], Tensor]:
    """`(errors and bounds, the retrained run (T + 1, p))` of one occurrence."""
    without = run.theta.clone()  # (T + 1, p)
    for t in range(at, len(run.rates)):
        g = run.net.gradients(without[t], t)  # (B, p)
        gone = g[position] if t == at else torch.zeros_like(g[0])
        without[t + 1] = without[t] - run.rates[t] * (g.sum(0) - gone) / len(g)
    first = run.rates[at] / len(run.net.gradients(run.theta[at], at)) * run.net.gradients(run.theta[at], at)[position]
    d = (without - run.theta).norm(dim=1)  # (T + 1,)
    second = float((run.growth * run.rates * run.lipschitz * d[:-1].square())[at + 1 :].sum())
    return {"step": at, **_compared(run, at, first, without, d, second)}, without


def _compared(run: Run, at: int, first: Tensor, without: Tensor, d: Tensor, second: float) -> dict[str, Any]:
    """Errors of each estimate and their bounds; `second` is the proof's chain for exact unrolling."""
    net, end = run.net, run.theta[-1]
    slope, bend = net.query_gradient(end), net.query_bend(end, without[-1])
    truth = float(net.query(without[-1]) - net.query(end))
    row: dict[str, Any] = {"truth": truth, "distance": float(d[-1]), "weights_bound": second}
    for name in CURVATURES:
        path = _carried(run, at, first, name)  # (T + 1, p)
        extra = _deviation(run, at, path, name)
        score = float(slope @ path[-1])
        row[name] = {
            "influence": score,
            "error": abs(score - truth),
            "bound": float(slope.norm()) * (second + extra) + 0.5 * bend * float(d[-1]) ** 2,
            "weights_error": float((without[-1] - end - path[-1]).norm()),
        }
    return row


def _carried(run: Run, at: int, first: Tensor, name: str) -> Tensor:
    """The estimated displacement before each step, (T + 1, p): 0 up to the removal."""
    path = torch.zeros_like(run.theta)
    path[at + 1] = first
    for t in range(at + 1, len(run.rates)):
        path[t + 1] = path[t] - run.rates[t] * run.curvature[name][t] @ path[t]
    return path


def _deviation(run: Run, at: int, path: Tensor, name: str) -> float:
    """Σ_s ρ_s η_s ‖H_s − F_s‖ ‖Δ̂_s‖."""
    if name == "hessian":
        return 0.0
    off = torch.linalg.matrix_norm(run.curvature["hessian"] - run.curvature[name], 2)  # (T,)
    return float((run.growth * run.rates * off * path[:-1].norm(dim=1))[at + 1 :].sum())


def _constants(run: Run, C: float, G: float) -> Constants:
    H, T = run.curvature["hessian"], len(run.rates)
    norms = torch.linalg.matrix_norm(H, 2)
    t = torch.arange(1, T + 1, dtype=torch.float64)
    L, Lambda = float(run.lipschitz.max()), float((t.sqrt() * norms).max())
    head = torch.tensor(32 / 3 * G**2 * C**3 * L, dtype=torch.float64)
    log = torch.log(t[-1]) / T**0.5
    off = {n: float((torch.linalg.matrix_norm(H - run.curvature[n], 2) / norms).mean()) for n in CURVATURES[1:]}
    theorem, proof = (float(head * torch.tensor(C * Lambda * x).double().exp()) for x in (1.0, float(log)))
    return Constants(T, H.shape[1], C, G, L, Lambda, theorem, proof, float(run.growth.max()), off)


def _verdict(constants: Constants, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Whether each bound held, and the median of bound / error."""

    def median(values: list[float]) -> float:
        return float(torch.tensor(values, dtype=torch.float64).median())

    errors = [r["hessian"]["weights_error"] for r in rows]
    result: dict[str, Any] = {
        "theorem": {
            "held": all(e <= constants.theorem for e in errors),
            "looseness": median([constants.theorem / max(e, 1e-300) for e in errors]),
            "against_distance": median([constants.theorem / max(r["distance"], 1e-300) for r in rows]),
        },
        "proof_chain": {
            "held": all(e <= r["weights_bound"] * (1 + 1e-9) + 1e-14 for e, r in zip(errors, rows, strict=True)),
            "looseness": median([r["weights_bound"] / max(e, 1e-300) for e, r in zip(errors, rows, strict=True)]),
        },
    }
    for name in CURVATURES:
        pairs = [(r[name]["bound"], r[name]["error"], abs(r["truth"])) for r in rows]
        result[name] = {
            "held": all(b * (1 + 1e-9) + 1e-14 >= e for b, e, _ in pairs),
            "looseness": median([b / max(e, 1e-300) for b, e, _ in pairs]),
            "error_of_truth": median([e / max(size, 1e-300) for _, e, size in pairs]),
            "bound_of_truth": median([b / max(size, 1e-300) for b, _, size in pairs]),
        }
    return {"verdict": result}
