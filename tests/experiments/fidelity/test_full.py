"""Influences without rows: against rows that are written out, and against automatic differentiation of the whole run."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from experiments.data.images import Setup, loss, mean_loss, recipe, setup_of
from experiments.fidelity.full import Replay, corrected, influences, replayed
from tests.support.oracles import assert_same
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from backstory.errors import UsageError
from backstory.maths.adjoint import Adjoint
from backstory.maths.curvature import exact_seeds
from backstory.maths.steps import Coefficients, Contraction, Step
from backstory.replay.recipe import Recipe

MLP = setup_of("tiny", "gelu", "sgd", 2)
TERMS = 12 * ((64 + 1) + (8 + 1) + 10 + 16 + (10 + 16 + 16))  # 12 steps: forward, softmax, mean, backward
CNN = replace(MLP, net="cnn", images=32, activation="relu")


def flat(grads: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in grads])


def rows(made: Recipe, values: Tensor) -> Tensor:
    """One backward pass for each entry."""
    parameters = list(made.model.parameters())
    return torch.stack([flat(torch.autograd.grad(v, parameters, retain_graph=True)) for v in values.reshape(-1)])


def by_rows(replay: Replay, curvature: str, contraction: Contraction) -> Tensor:
    made = replay.recipe
    replay.load(-1)
    adjoint = Adjoint(rows(made, mean_loss(made.model, made.queries["test"])), contraction=contraction)
    actual: list[Tensor] = []
    for t in reversed(range(len(made.batches))):
        ids, batch = made.batches[t]
        replay.load(t)
        w = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64)
        G, V = rows(made, made.loss(made.model, batch)), None
        if curvature == "exact":
            f = made.model(batch[0])
            V = torch.cat([rows(made, (f * s).sum(1)) / len(ids) ** 0.5 for s in exact_seeds(f, "cross-entropy")])
        actual.insert(0, adjoint.influence(Step(G, w, Coefficients(replay.updates[t].rate, 0, 0, 0, 0, 1, 0), V))[0])
    return torch.cat(actual)


@pytest.mark.parametrize("setup", [MLP, CNN], ids=["mlp", "cnn"])
@pytest.mark.parametrize(
    ("curvature", "form", "contraction"),
    [
        ("empirical", "literal", "never"),
        ("empirical", "implicit", "always"),
        ("empirical", "auto", "when_expanding"),
        ("exact", "literal", "never"),
    ],
)
def test_products_equal_rows(setup: Setup, curvature: str, form: str, contraction: Contraction) -> None:
    setup = replace(setup, rate=0.3)  # so that propagation matters
    replay = replayed(recipe(setup, 0))
    actual = influences(replay, curvature, form=form)
    expected = by_rows(replay, curvature, contraction)
    ratio = float((actual / expected).median())
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-13), (
        f"median ratio {ratio:.6f}: {setup.batch_size} would mean a missing weight, {1 / setup.rate:g} a missing rate"
    )
    plain = influences(replay, "none")
    assert not torch.allclose(actual, plain, rtol=1e-3), "propagation changes nothing here: the test shows nothing"


@pytest.mark.parametrize("setup", [MLP, CNN], ids=["mlp", "cnn"])
def test_the_corrected_removal_follows_the_net_without_the_sample(setup: Setup) -> None:
    """One epoch: nothing to correct, so forward and backward agree."""
    replay = replayed(recipe(replace(setup, epochs=1, rate=0.3), 0))
    names = [int(i) for ids, _ in replay.recipe.batches for i in ids]
    assert torch.allclose(corrected(replay, names), influences(replay, "exact"), rtol=1e-9, atol=1e-13)


def test_a_replay_is_the_same_twice_and_ends_at_its_last_state() -> None:
    a, b = (replayed(recipe(MLP, 1)) for _ in range(2))
    end = {name: value.clone() for name, value in a.recipe.model.state_dict().items()}
    for name, value in end.items():
        assert_same(value, b.states[-1][name], TERMS, size=1.0)
        assert value.dtype == torch.float64
    influences(a, "empirical", form="implicit")
    assert all(torch.equal(v, end[n]) for n, v in a.recipe.model.state_dict().items())


Make = Callable[[list[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.3, weight_decay=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.4, weight_decay=0.05),
    "nesterov": lambda p: SGD(p, lr=0.1, momentum=0.8, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=0.02, betas=(0.8, 0.9), weight_decay=0.1),
}


def linear_run(make: Make) -> Recipe:
    """A linear softmax classifier: its Hessian is its Gauss–Newton matrix, so exact curvature is exact."""
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 4)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=g))

    def draw(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, 6, generator=g, dtype=torch.float64), torch.randint(4, (n,), generator=g)

    batches = [(list(range(5)), draw(5)) for _ in range(8)]
    return Recipe(
        model=model, optimizer=make(list(model.parameters())), loss=loss, batches=batches, queries={"test": draw(3)}
    )


def by_hand(theta: Tensor, m: Tensor, grad: Tensor, P: Tensor, group: dict[str, Any], t: int) -> tuple[Tensor, Tensor]:
    """One update as torch's documentation writes it, all parameters in one vector, with P in place of 1/(√v̂+ε)."""
    if "betas" in group:
        beta = group["betas"][0]
        theta = theta - group["lr"] * group["weight_decay"] * theta
        m = beta * m + (1 - beta) * grad
        return theta - group["lr"] * P * m / (1 - beta ** (t + 1)), m
    grad = grad + group["weight_decay"] * theta
    m = grad if t == 0 else group["momentum"] * m + (1 - group["dampening"]) * grad
    return theta - group["lr"] * (grad + group["momentum"] * m if group["nesterov"] else m), m


def by_differentiation(make: Make, factored: bool) -> Tensor:
    """−w ∂ℓ/∂w of each occurrence, through updates at the run's own weights with P frozen."""
    made = linear_run(make)
    group, parameters = made.optimizer.param_groups[0], list(made.model.parameters())
    X = made.queries["test"]
    all_w, states, diagonals = [], [], []
    for _, batch in made.batches:
        states.append(flat(tuple(parameters)).detach().clone())
        made.optimizer.zero_grad()
        loss(made.model, batch).mean().backward()
        made.optimizer.step()
        diagonals.append(flat(tuple(frozen(made.optimizer, p, factored) for p in parameters)))
    theta = states[0].clone().requires_grad_()
    m = torch.zeros_like(theta)
    for t, (ids, (x, y)) in enumerate(made.batches):
        w = torch.full((len(ids),), 1 / len(ids), dtype=torch.float64, requires_grad=True)
        moved = theta + (states[t] - theta).detach()  # at the run's weights, with the derivative of the recursion
        f = x @ moved[:24].reshape(4, 6).T + moved[24:]
        (grad,) = torch.autograd.grad(
            (w * nn.functional.cross_entropy(f, y, reduction="none")).sum(), moved, create_graph=True
        )
        theta, m = by_hand(moved, m, grad, diagonals[t], group, t)
        all_w.append(w)
    if not factored:
        assert torch.allclose(theta, flat(tuple(parameters)), rtol=1e-10), "the update by hand is not torch's"
    theta = theta + (flat(tuple(parameters)) - theta).detach()
    asked = nn.functional.cross_entropy(X[0] @ theta[:24].reshape(4, 6).T + theta[24:], X[1])
    return torch.cat([-w * g for w, g in zip(all_w, torch.autograd.grad(asked, all_w), strict=True)]).detach()


def frozen(optimizer: Optimizer, p: nn.Parameter, factored: bool) -> Tensor:
    """P of one parameter after an update."""
    state, group = optimizer.state.get(p, {}), optimizer.param_groups[0]
    if "exp_avg_sq" not in state:
        return torch.ones_like(p).detach()
    v = state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))
    if factored and v.dim() == 2:
        v = torch.stack([torch.stack([v[i, :].sum() * v[:, j].sum() for j in range(6)]) for i in range(4)]) / v.sum()
    actual: Tensor = 1 / (v.sqrt() + group["eps"])
    return actual


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("model", ["aware", "factored"])
def test_exact_curvature_is_the_derivative_of_the_run(name: str, model: str) -> None:
    actual = influences(replayed(linear_run(OPTIMIZERS[name])), "exact", model=model)
    expected = by_differentiation(OPTIMIZERS[name], model == "factored")
    ratio = float((actual / expected).median())
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-14), (
        f"median ratio {ratio:.6f}: 5 would mean a missing weight; another one for each step, a wrong coefficient"
    )


def test_the_factored_diagonal_and_the_proxy_are_other_models() -> None:
    replay = replayed(linear_run(OPTIMIZERS["adamw"]))
    aware = influences(replay, "exact")
    for model in ("factored", "proxy"):
        assert not torch.allclose(influences(replay, "exact", model=model), aware, rtol=0.01), model


def by_embeddings(replay: Replay, form: str, P_of: Callable[[int], Tensor], coefficients: Any) -> tuple[Tensor, int]:
    """`(⟨v, e⟩ of each occurrence, steps in implicit form)`: the two matrices ∂θ_T/∂θ and ∂θ_T/∂m, written out."""
    made = replay.recipe
    replay.load(-1)
    v = rows(made, mean_loss(made.model, made.queries["test"]))[0]
    A, C = torch.eye(len(v), dtype=torch.float64), torch.zeros(len(v), len(v), dtype=torch.float64)
    implicit, actual = 0, list[Tensor]()
    for t in reversed(range(len(made.batches))):
        rate, mu, tau, a = coefficients(t)
        replay.load(t)
        G, P = rows(made, made.loss(made.model, made.batches[t][1])), P_of(t)
        V = G / len(G) ** 0.5
        chosen = form == "implicit" or (form == "auto" and swings(V, P, rate, mu, tau, a))
        implicit += chosen and t > 0  # the first step's curvature meets nothing
        damp = rate * (1 - tau) * a / (1 - mu) if chosen else 0.0
        H = V.T @ torch.linalg.inv(torch.eye(len(V)).double() + damp * V @ torch.diag(P) @ V.T) @ V
        U = C - rate * a * A @ torch.diag(P)
        actual.insert(0, -((1 - tau) * U @ G.T).T @ v / len(G))
        A, C = A + (1 - tau) * U @ H, mu * U
    return torch.cat(actual), implicit


def swings(V: Tensor, P: Tensor, rate: float, mu: float, tau: float, a: float) -> bool:
    """Whether θ and m grow when the step is taken again and again: an eigenvalue of the pair beyond 1 in size."""
    for h in torch.linalg.eigvalsh(V @ torch.diag(P) @ V.T).clamp_min(0).tolist():
        pair = torch.tensor([[1 - rate * a * (1 - tau) * h, -rate * a * mu], [(1 - tau) * h, mu]], dtype=torch.float64)
        if float(torch.linalg.eigvals(pair).abs().max()) > 1 + 1e-9:
            return True
    return False


@pytest.mark.parametrize("form", ["literal", "implicit", "auto"])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_the_empirical_forms_equal_embeddings_that_are_written_out(optimizer: str, form: str) -> None:
    setup = replace(MLP, optimizer=optimizer, images=48, batch_size=8, epochs=1, rate=20.0)
    made = recipe(setup, 0)
    if optimizer == "adamw":
        made.optimizer.param_groups[0]["lr"] = 0.15
    replay = replayed(made)
    names = [n for n, _ in replay.recipe.model.named_parameters()]

    def P_of(t: int) -> Tensor:
        v = replay.updates[t].v
        return torch.ones(replay.width).double() if v is None else 1 / (flat(tuple(v[n] for n in names)).sqrt() + 1e-8)

    def coefficients(t: int) -> tuple[float, float, float, float]:
        return (2.0, 0.9, 0.0, 1.0) if optimizer == "momentum" else (0.15, 0.9, 0.9, 1 / (1 - 0.9 ** (t + 1)))

    actual = influences(replay, "empirical", form=form)
    expected, implicit = by_embeddings(replay, form, P_of, coefficients)
    assert torch.allclose(actual, expected, rtol=1e-7, atol=1e-12 * float(expected.abs().max()))
    if form == "auto":
        assert 0 < implicit < len(replay.updates), "either form must occur, or the test shows nothing"


def test_the_correction_is_for_plain_sgd() -> None:
    with pytest.raises(UsageError, match="plain SGD"):
        corrected(replayed(recipe(replace(MLP, optimizer="momentum"), 0)), [0])
