"""EK-FAC by kronfluence, against the formula written out for each layer."""

import importlib.util
import logging
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import Batch, D, N, by_id, correlation, cross_entropy, data, mlp, queries, ratio, recipe
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.ekfac import _join, _singles, _split, ekfac, quiet
from backstory.baselines.gradients import survey
from backstory.errors import CoverageError, UnsupportedError, UsageError

HERE = importlib.util.find_spec("kronfluence") is not None
needs = pytest.mark.skipif(not HERE, reason="needs the extra: pip install '.[baselines]' in the checkout (kronfluence)")


def test_quiet_gives_the_root_logger_back(capfd: pytest.CaptureFixture[str]) -> None:
    before, level = list(logging.getLogger().handlers), logging.getLogger().level
    with quiet():
        logging.getLogger().addHandler(logging.StreamHandler())
        logging.getLogger().setLevel(1)
        sys.stderr.write("a progress bar")
    assert logging.getLogger().handlers == before
    assert logging.getLogger().level == level
    assert capfd.readouterr().err == ""


def layer_gradients(xy: Batch) -> list[tuple[Tensor, Tensor]]:
    """`(inputs with a 1 (n, d_in + 1), output gradients (n, d_out))` of the two layers of the small net."""
    model, (x, y) = mlp(), xy
    w0, b0, w2, b2 = (p.detach() for p in model.parameters())
    h = torch.tanh(x @ w0.T + b0)
    delta2 = (h @ w2.T + b2).softmax(1) - F.one_hot(y, 3)
    delta0 = (delta2 @ w2) * (1 - h.square())
    one = torch.ones(len(x), 1, dtype=D)
    return [(torch.cat([x, one], 1), delta0), (torch.cat([h, one], 1), delta2)]


def written_out(damping: float | None) -> Tensor:
    total = torch.zeros(5, N, dtype=D)
    for (a, d), (aq, dq) in zip(layer_gradients(data()), layer_gradients(queries()), strict=True):
        QA, QS = torch.linalg.eigh(a.T @ a / N)[1], torch.linalg.eigh(d.T @ d / N)[1]
        G = torch.einsum("ni,nj->nij", d @ QS, a @ QA)
        V = torch.einsum("ni,nj->nij", dq @ QS, aq @ QA)
        L = G.square().mean(0)
        L = L + (0.1 * L.mean() if damping is None else damping)
        total += torch.einsum("qij,nij->qn", V / L, G) / N
    return total


@needs
@pytest.mark.parametrize("damping", [1e-3, None])
def test_the_formula_written_out(damping: float | None) -> None:
    actual = ekfac(recipe(), queries(), damping=damping)
    assert_close(by_id(actual), written_out(damping), 1e-9, "N means a missing 1/N")
    text = " ".join(actual.caveats)
    assert "kronfluence" in text
    assert "units of the query's loss" in text
    assert "left out" not in text


@needs
def test_batch_size_does_not_matter_and_the_model_is_left_alone() -> None:
    made = recipe(size=7, seed=3)
    kinds = [type(m) for m in made.model.modules()]
    actual = ekfac(made, queries(), batch_size=4)
    assert_close(by_id(actual), written_out(1e-3), 1e-9)
    assert [type(m) for m in made.model.modules()] == kinds
    assert all(p.requires_grad for p in made.model.parameters())


@needs
def test_a_scalar_loss_is_one_query() -> None:
    actual = ekfac(recipe(), queries(), loss=lambda m, b: cross_entropy(m, b).mean())
    assert_close(by_id(actual)[0], written_out(1e-3).mean(0), 1e-9)


@needs
def test_ggn_draws_are_near_their_expectation() -> None:
    """One linear layer, and labels that the model thinks unlikely: the empirical Fisher is far too large."""
    x, _ = data(1500)
    model = nn.Linear(4, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(1), dtype=D))
        model.bias.zero_()
    xy = (x, model(x).detach().argmin(1))

    def sides(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        p = model(batch[0]).detach().softmax(1)
        a = torch.cat([batch[0], torch.ones(len(p), 1, dtype=D)], 1)
        return a, p - F.one_hot(batch[1], 3), torch.diag_embed(p) - p[:, :, None] * p[:, None, :]

    (a, d, H), (aq, dq, _) = sides(xy), sides(queries())
    QA, QS = torch.linalg.eigh(a.T @ a)[1], torch.linalg.eigh(H.mean(0))[1]
    L = torch.einsum("ci,ncd,di,nj->nij", QS, H, QS, (a @ QA).square()).mean(0) + 0.02
    expected = torch.einsum("qi,qj,ij,ni,nj->qn", dq @ QS, aq @ QA, 1 / L, d @ QS, a @ QA) / 1500
    made = recipe(model, xy=xy, size=500)
    actual = by_id(ekfac(made, queries(), hessian="ggn", damping=0.02), 1500)
    assert correlation(actual, expected) > 0.98
    assert abs(ratio(actual, expected) - 1) < 0.1
    assert ratio(by_id(ekfac(made, queries(), damping=0.02), 1500), expected) < 0.5


@needs
def test_what_is_left_out_is_named() -> None:
    normed = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()
    notes = " ".join(ekfac(recipe(normed), queries()).caveats)
    assert "left out: 1.weight, 1.bias" in notes
    with pytest.raises(CoverageError, match="only these"):
        ekfac(recipe(nn.Sequential(nn.LayerNorm(4)).double()), queries())
    with pytest.raises(UsageError, match="'fisher', 'ggn'"):
        ekfac(recipe(), queries(), hessian="exact")


@needs
def test_convolutions_and_dicts() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Linear(2, 3)).double()

    def loss(m: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(m(batch["x"].reshape(-1, 1, 2, 2)), batch["y"], reduction="none")

    made = recipe(model, loss=lambda m, b: loss(m, {"x": b[0], "y": b[1]}))
    a = ekfac(made, queries())
    made = recipe(model, loss=loss)
    object.__setattr__(made, "batches", [(ids, {"x": b[0], "y": b[1]}) for ids, b in made.batches])
    b = ekfac(made, dict(zip("xy", queries(), strict=True)))
    assert_close(a.scores, b.scores, 1e-9)


@needs
def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    ekfac(recipe(), queries())
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(HERE, reason="kronfluence is installed")
def test_without_the_package_the_error_says_how_to_get_it() -> None:
    with pytest.raises(UnsupportedError, match=r"pip install '\.\[baselines\]' in the checkout"):
        ekfac(recipe(), queries())


def test_batches_are_taken_apart_in_the_order_of_the_columns() -> None:
    made = recipe(size=7, epochs=3)
    training, (x, y) = survey(made), data()
    ids = [int(s) for s in training.samples]
    whole = _join(_split(made, training))
    assert torch.equal(whole[0], x[ids])
    assert torch.equal(whole[1], y[ids])


def test_batches_of_other_forms() -> None:
    x, y = data()
    assert torch.equal(_singles({"x": (x, y)}, [3, 1], 30)[1]["x"][0], x[1:2])
    assert torch.equal(_join([{"x": x[:2]}, {"x": x[2:]}])["x"], x)
    with pytest.raises(UsageError, match="split by sample, got str in a batch of 30 samples"):
        _singles((x, "text"), [0], 30)
