"""The influence function: against dense inverses, and against real leave-one-out on convex models."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import (
    Batch,
    D,
    Loss,
    N,
    by_id,
    correlation,
    cross_entropy,
    data,
    minimise,
    mlp,
    queries,
    ratio,
    recipe,
    rows,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.influence import influence_function, influence_sweep
from backstory.errors import NumericalError, UsageError

EYE = torch.eye(43, dtype=D)


def pieces() -> tuple[Tensor, Tensor]:
    return rows(mlp(), cross_entropy, data()), rows(mlp(), cross_entropy, queries())


def ggn() -> Tensor:
    """Σ Jᵀ (diag p − ppᵀ) J / N with dense Jacobians."""
    model, (x, _) = mlp(), data()
    H = torch.zeros(43, 43, dtype=D)
    for i in range(N):
        out = model(x[i : i + 1])[0]
        J = torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(o, list(model.parameters()), retain_graph=True)])
                         for o in out])  # fmt: skip
        p = out.detach().softmax(0)
        H += J.T @ (torch.diag(p) - torch.outer(p, p)) @ J / N
    return H


@pytest.mark.parametrize(("n", "damping"), [(30, 1e-3), (30, 1e-6), (60, 1e-3)])
def test_fisher_is_the_dense_inverse(n: int, damping: float) -> None:
    """30 samples and 43 coordinates take one side, 60 samples the other."""
    xy = data(n)
    G, V = rows(mlp(), cross_entropy, xy), pieces()[1]
    expected = V @ torch.linalg.inv(G.T @ G / n + damping * EYE) @ G.T / n
    actual = influence_function(recipe(xy=xy), queries(), damping=damping)
    assert_close(by_id(actual, n), expected, 1e-8, "N instead of 1 means a missing 1/N")


def test_relative_damping_is_times_the_mean_eigenvalue() -> None:
    G, V = pieces()
    H = G.T @ G / N
    expected = V @ torch.linalg.inv(H + 0.1 * torch.linalg.eigvalsh(H).mean() * EYE) @ G.T / N
    actual = influence_function(recipe(), queries(), damping=0.1, relative=True)
    assert_close(by_id(actual), expected, 1e-9)
    assert "mean eigenvalue" in " ".join(actual.caveats)


@pytest.mark.parametrize("hessian", ["fisher", "ggn"])
@pytest.mark.parametrize("relative", [False, True])
def test_parameters_taken_as_independent(hessian: str, relative: bool) -> None:
    G, V = pieces()
    H = G.T @ G / N if hessian == "fisher" else ggn()
    expected = torch.zeros(5, N, dtype=D)
    for lo, hi in ((0, 20), (20, 25), (25, 40), (40, 43)):
        h = H[lo:hi, lo:hi]
        size = 0.01 * float(h.trace()) / (hi - lo) if relative else 0.01
        eye = torch.eye(hi - lo, dtype=D)
        expected += V[:, lo:hi] @ torch.linalg.inv(h + size * eye) @ G[:, lo:hi].T / N
    actual = influence_function(recipe(), queries(), damping=0.01, relative=relative, per_layer=True, hessian=hessian)
    assert_close(by_id(actual), expected, 1e-9)


@pytest.mark.parametrize("n", [30, 10])
def test_ggn_is_the_dense_one(n: int) -> None:
    """30 × 3 curvature rows outnumber 43 coordinates; 10 × 3 do not."""
    G, V = (x for x in pieces())
    xy = tuple(x[:n] for x in data())
    model = mlp()
    H = torch.zeros(43, 43, dtype=D)
    for i in range(n):

        def output(*flat: Tensor) -> Tensor:
            named = dict(zip(dict(model.named_parameters()), flat, strict=True))
            out: Tensor = torch.func.functional_call(model, named, (xy[0][i : i + 1],))[0]  # noqa: B023
            return out

        J = torch.cat(
            [j.reshape(3, -1) for j in torch.autograd.functional.jacobian(output, tuple(model.parameters()))], 1
        )
        p = output(*model.parameters()).detach().softmax(0)
        H += J.T @ (torch.diag(p) - torch.outer(p, p)) @ J / n
    expected = V @ torch.linalg.inv(H + 0.01 * EYE) @ G[:n].T / n
    actual = influence_function(recipe(xy=(xy[0], xy[1]), size=4), queries(), damping=0.01, hessian="ggn")
    assert_close(by_id(actual, n), expected, 1e-8)


def test_projected_is_the_dense_inverse_of_projected_rows() -> None:
    """With the sides that the seed gives, taken from the answer of the identity."""
    from backstory.maths.projection import random_basis, shape_of

    G, V = pieces()
    blocks, lo = [], 0
    for name, p in mlp().named_parameters():
        basis = random_basis(shape_of(p.shape, (2, 2)), seed=3, name=name)
        L, R = basis.left, basis.right
        L = torch.eye(p.shape[0], dtype=D) if L is None else L.double()
        R = torch.eye(p[0].numel() if p.dim() > 1 else 1, dtype=D) if R is None else R.double()
        blocks.append((slice(lo, lo + p.numel()), torch.kron(L, R)))
        lo += p.numel()
    PG, PV = (torch.cat([x[:, s] @ K for s, K in blocks], 1) for x in (G, V))
    eye = torch.eye(PG.shape[1], dtype=D)
    expected = PV @ torch.linalg.inv(PG.T @ PG / N + 1e-3 * eye) @ PG.T / N
    actual = influence_function(recipe(), queries(), rank=2, seed=3)
    assert_close(by_id(actual), expected, 1e-6)
    assert actual.method == "influence function (LoGRA)"


def test_batch_size_and_order_do_not_matter() -> None:
    for hessian in ("fisher", "ggn"):
        expected = by_id(influence_function(recipe(), queries(), hessian=hessian))
        other = influence_function(recipe(size=11, seed=4, epochs=1), queries(), hessian=hessian)
        assert_close(by_id(other), expected, 1e-8)


def test_a_sweep_is_its_members() -> None:
    swept = influence_sweep(recipe(), queries(), [1e-2, 1.0])
    for damping, actual in zip((1e-2, 1.0), swept, strict=True):
        assert_close(actual.scores, influence_function(recipe(), queries(), damping=damping).scores, 1e-12)


def loo(model: nn.Module, loss: Loss, xy: Batch, asked: Batch, penalty: float) -> tuple[nn.Module, Tensor]:
    """`(model at the minimum, ℓ(without z) − ℓ(with z))`: every sample left out and trained to the minimum again."""

    def objective(m: nn.Module, keep: Tensor) -> Tensor:
        squares = torch.stack([p.square().sum() for p in m.parameters()]).sum()
        return (loss(m, xy) * keep).sum() / len(keep) + penalty / 2 * squares

    everything = torch.ones(len(xy[0]), dtype=D)
    trained = minimise(model, lambda m: objective(m, everything))
    base = loss(trained, asked).detach()
    out = []
    for i in range(len(everything)):
        keep = everything.clone()
        keep[i] = 0
        out.append(loss(minimise(trained, lambda m: objective(m, keep)), asked).detach() - base)  # noqa: B023
    return trained, torch.stack(out, 1)


def test_ridge_regression_left_out_for_real() -> None:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(60, 4, generator=g, dtype=D)
    y = x @ torch.randn(4, 1, generator=g, dtype=D) + torch.randn(60, 1, generator=g, dtype=D)
    asked = (x[:6] + 0.3, y[:6])

    def squared(m: nn.Module, batch: Batch) -> Tensor:
        return F.mse_loss(m(batch[0]), batch[1], reduction="none").sum(1)

    trained, truth = loo(nn.Linear(4, 1).double(), squared, (x, y), asked, 0.1)
    made = recipe(trained, loss=squared, xy=(x, y))
    actual = by_id(influence_function(made, asked, damping=0.1, hessian="ggn"), 60)
    r, c = ratio(actual, truth), correlation(actual, truth)
    assert abs(r - 1) < 0.15, f"{r:.3f} × the truth; −1 means the sign, 60 a missing 1/N, 2 a missing second derivative"
    assert c > 0.995


def test_logistic_regression_left_out_for_real() -> None:
    xy = data(60)
    trained, truth = loo(nn.Linear(4, 3).double(), cross_entropy, xy, queries(), 0.05)
    made = recipe(trained, xy=xy)
    for hessian, slack, least in (("ggn", 0.12, 0.995), ("fisher", 0.5, 0.95)):
        actual = by_id(influence_function(made, queries(), damping=0.05, hessian=hessian), 60)
        r, c = ratio(actual, truth), correlation(actual, truth)
        assert abs(r - 1) < slack, f"{hessian}: {r:.3f} × the truth; −1 means the sign, 60 a missing 1/N"
        assert c > least, f"{hessian}: correlation {c:.3f}"


def test_answers_say_what_they_assume() -> None:
    answer = influence_function(recipe(), queries())
    text = " ".join(answer.caveats)
    assert "units of the query's loss" in text
    assert "damping 0.001" in text
    assert "empirical Fisher" in text


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="hessian must be one of"):
        influence_function(recipe(), queries(), hessian="exact")
    with pytest.raises(UsageError, match="≥ 0"):
        influence_function(recipe(), queries(), damping=-1.0)
    with pytest.raises(NumericalError, match="damping"):
        influence_function(recipe(), queries(), damping=0.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the peer
def test_dattri_agrees_where_the_hessian_is_the_ggn() -> None:
    """dattri 0.3.0 inverts the true Hessian, which a linear model's GGN is; its scores lack the 1/N."""
    algorithm = pytest.importorskip("dattri.algorithm", reason="compares with dattri: pip install dattri")
    task = pytest.importorskip("dattri.task")
    model = nn.Linear(4, 3).double()

    def loss(params: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(torch.func.functional_call(model, params, batch[0]), batch[1].reshape(-1))

    def loader(xy: Batch) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*xy), batch_size=N)

    made = task.AttributionTask(loss_func=loss, model=copy.deepcopy(model), checkpoints=dict(model.state_dict()))
    peer = algorithm.IFAttributorExplicit(task=made, regularization=0.05)
    peer.cache(loader(data()))
    expected = peer.attribute(loader(data()), loader(queries())).T.double() / N
    actual = by_id(influence_function(recipe(model), queries(), damping=0.05, hessian="ggn"))
    assert_close(actual, expected, 1e-4, "float32 sums in the peer")
