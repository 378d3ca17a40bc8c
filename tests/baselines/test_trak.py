"""Backstory's own TRAK, against the formula written out."""

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.problems import (
    Batch,
    D,
    by_id,
    correlation,
    cross_entropy,
    data,
    mlp,
    queries,
    recipe,
    rows,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn

from backstory.baselines.influence import influence_function
from backstory.baselines.trak import margins, trak
from backstory.errors import NumericalError, UsageError

BIG = data(80)


def margin(model: nn.Module, batch: Batch) -> Tensor:
    """log p/(1−p), from the probabilities."""
    p = model(batch[0]).softmax(1).gather(1, batch[1][:, None])[:, 0]
    return torch.log(p / (1 - p))


def expected(model: nn.Module, xy: Batch, damping: float) -> tuple[Tensor, Tensor]:
    """`(φ(q)ᵀ (ΦᵀΦ + λI)⁻¹ φ(z), 1 − p)`."""
    P, V = rows(model, margin, xy), rows(model, margin, queries())
    inverse = torch.linalg.inv(P.T @ P + damping * torch.eye(P.shape[1], dtype=D))
    p = model(xy[0]).detach().softmax(1).gather(1, xy[1][:, None])[:, 0]
    return V @ inverse @ P.T, 1 - p


@pytest.mark.parametrize("given", [None, margin])
def test_the_formula_written_out(given: object) -> None:
    a, b = expected(mlp(), BIG, 0.1)
    actual = trak(recipe(xy=BIG), queries(), damping=0.1, margin=given)  # type: ignore[arg-type]
    assert_close(by_id(actual, 80), a * b, 1e-8, "−1 means that losses were taken for margins")


def test_models_are_averaged_factor_by_factor() -> None:
    parts = [expected(mlp(seed), BIG, 0.1) for seed in (1, 2, 3)]
    mean = torch.stack([a for a, _ in parts]).mean(0) * torch.stack([b for _, b in parts]).mean(0)
    actual = trak(recipe(xy=BIG), queries(), models=[mlp(s).state_dict() for s in (1, 2, 3)], damping=0.1)
    assert_close(by_id(actual, 80), mean, 1e-8)
    assert "3 models" in " ".join(actual.caveats)


def test_a_loss_as_target_is_turned_around() -> None:
    """What lowers the loss helps, as everywhere."""
    made = recipe(xy=BIG)
    P, V = rows(mlp(), margin, BIG), rows(mlp(), cross_entropy, queries())
    inverse = torch.linalg.inv(P.T @ P + 0.1 * torch.eye(43, dtype=D))
    actual = by_id(trak(made, queries(), target="loss", damping=0.1), 80)
    assert_close(actual, -(V @ inverse @ P.T) * expected(mlp(), BIG, 0.1)[1], 1e-8)
    assert correlation(actual, by_id(influence_function(made, queries(), damping=0.1), 80)) > 0.4
    own = by_id(trak(made, BIG, damping=0.1), 80).diagonal()
    assert bool((own > 0).all()), "a sample must help its own margin"


def test_margins_of_logits_and_of_losses_agree() -> None:
    model = mlp()
    assert_close(margins(model(BIG[0]), BIG[1]), margin(model, BIG), 1e-10)


def test_batch_size_does_not_matter_and_ranks_are_said() -> None:
    a, b = (trak(recipe(xy=BIG, size=s, seed=s), queries(), rank=2, seed=5, damping=0.1) for s in (6, 80))
    assert_close(by_id(a, 80), by_id(b, 80), 1e-7)
    assert "rank only" in " ".join(a.caveats)
    assert "random projection" in " ".join(a.caveats)


def test_what_cannot_be_right_is_refused() -> None:
    with pytest.raises(UsageError, match="'margin', 'loss'"):
        trak(recipe(), queries(), target="logit")
    with pytest.raises(NumericalError, match="rank="):
        trak(recipe(), queries())
    with pytest.raises(UsageError, match="margin="):
        trak(recipe(loss=lambda m, b: cross_entropy(m, b) - 9), queries(), damping=0.1)
    sure = nn.Linear(4, 3)
    xy = (BIG[0].float(), BIG[1])

    def certain(m: nn.Module, batch: Batch) -> Tensor:
        logits = m(batch[0]) + 100 * F.one_hot(batch[1], 3)
        return F.cross_entropy(logits, batch[1], reduction="none")

    with pytest.raises(NumericalError, match="probability rounds to 1"):
        trak(recipe(sure, loss=certain, xy=xy), (xy[0][:2], xy[1][:2]), damping=0.1)
