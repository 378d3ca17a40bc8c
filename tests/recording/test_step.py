"""What a step is told, and what it makes of it: weights, losses, and refusals that name the step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import FULL, batch_of, cross_entropy, mlp, sgd
from torch import Tensor

import backstory
from backstory.errors import NumericalError, UsageError
from backstory.recording.step import StepScope, safe_inverse


def scope(reduction: str = "mean") -> StepScope:
    return StepScope(7, reduction, [], None)


def test_weights_are_those_of_the_whole_step() -> None:
    mean = scope()
    mean.batch([1, 2])
    mean.batch([3, 4])
    assert mean.weights().tolist() == [0.25] * 4
    total = scope("sum")
    total.batch([1, 2])
    total.batch([3])
    assert total.weights().tolist() == [1.0] * 3
    given = scope("weights")
    given.batch([1, 2], weights=[0.5, 2])
    given.batch([3], weights=torch.tensor([0.1], dtype=torch.float64))
    assert given.weights().tolist() == [0.5, 2.0, 0.1]
    tokens = scope("token-mean")
    tokens.batch([1, 2], tokens=[3, 0])
    tokens.batch([3], tokens=torch.tensor([5]))
    assert tokens.weights().tolist() == [0.125] * 3


def test_unequal_micro_batches_have_no_mean() -> None:
    s = scope()
    s.batch([1, 2])
    s.batch([3])
    with pytest.raises(
        UsageError, match=r"step 7 accumulates micro-batches of unequal sizes \[2, 1\].*loss_reduction='weights'"
    ):
        s.weights()


def test_a_token_mean_needs_tokens() -> None:
    s = scope("token-mean")
    s.batch([1, 2])
    with pytest.raises(UsageError, match=r"needs the token count.*tokens= to s.batch\(\), or mask="):
        s.weights()
    empty = scope("token-mean")
    empty.batch([1], tokens=[0])
    with pytest.raises(UsageError, match="no token in the batch has a loss"):
        empty.weights()


@pytest.mark.parametrize("sizes", [[2, 1], [3]])
def test_what_a_step_lacks_is_said_before_the_update(sizes: list[int], tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    reduction = "mean" if len(sizes) > 1 else "token-mean"
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction=reduction, **FULL) as rec:
        with rec.step() as s:
            for part in torch.arange(3).split(sizes):
                s.batch(part)
                cross_entropy(model, batch_of(part.tolist())).mean().backward()
            with pytest.raises(UsageError, match="unequal sizes" if len(sizes) > 1 else "token count"):
                optimizer.step()
            rec.watcher.reader.scaler = object()  # as if a scaler had skipped it, so that the step may end
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_weights_and_reduction_must_fit() -> None:
    with pytest.raises(UsageError, match="got loss_reduction='mean' with weights"):
        scope().batch([1], weights=[1.0])
    with pytest.raises(UsageError, match="got loss_reduction='weights' without weights"):
        scope("weights").batch([1])


def test_ids_are_checked_over_the_whole_step() -> None:
    t = scope()
    t.batch([1])
    with pytest.raises(UsageError, match="step 7 has str ids, but earlier ones are int"):
        t.batch(["a"])
    with pytest.raises(UsageError, match="all strings, got int, str"):
        scope().batch([1, "a"])
    with pytest.raises(UsageError, match="step 7 declares an empty batch"):
        scope().batch([])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.losses(torch.ones(2)), r"s.losses\(\) was called before s.batch"),
        (lambda s: s.outputs(torch.ones(2, 3), "other"), r"s.outputs\(\) was called before s.batch"),
    ],
)
def test_things_come_in_order(call: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        call(scope())


def test_outputs_and_losses_belong_to_the_current_batch() -> None:
    s = scope("token-mean")
    s.batch([1, 2])
    with pytest.raises(UsageError, match="kind must be one of 'cross-entropy'"):
        s.outputs(torch.ones(2, 3), "softmax")
    with pytest.raises(UsageError, match="one row for each of the 2 samples of the batch, got 3"):
        s.outputs(torch.ones(3, 3), "other")
    with pytest.raises(UsageError, match="losses must have one value per sample, got 3 for 2"):
        s.losses(torch.ones(3))
    with pytest.raises(NumericalError, match="losses of the batch contain NaN or Inf"):
        s.losses(torch.tensor([1.0, torch.nan]))
    s.outputs(torch.ones(2, 4, 3), "cross-entropy", mask=torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]]))
    assert s.weights().tolist() == [1 / 3] * 2
    s.losses(torch.tensor([1.0, 2.0]))
    s.batch([3], tokens=[1])
    column = s.loss_column()
    assert column[:2].tolist() == [1.0, 2.0]
    assert bool(column[2].isnan())


def test_weights_given_must_be_finite_and_complete() -> None:
    with pytest.raises(UsageError, match="weights must have one value per sample, got 1 for 2"):
        scope("weights").batch([1, 2], weights=[1.0])
    with pytest.raises(NumericalError, match="weights of the batch contain NaN or Inf"):
        scope("weights").batch([1, 2], weights=[1.0, float("inf")])


def test_the_inverse_of_no_weight_is_zero() -> None:
    actual: Tensor = safe_inverse(torch.tensor([0.0, 4.0]))
    assert actual.tolist() == [0.0, 0.25]


def test_rows_whose_sum_overflows_are_finite_all_the_same() -> None:
    """The sum of all is looked at first, because it is quicker; it says nothing where it overflows."""
    opened = scope("mean")
    opened.batch([0, 1])
    opened.check_finite(torch.full((2, 3), 3e38))
    opened.check_finite(torch.zeros(2, 0))
