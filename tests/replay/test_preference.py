"""Preference queries: the difference of two queries, in one."""

from pathlib import Path

import pytest
import torch
from tests.support.adam import adamw
from tests.support.loops import FULL, batch_of, cross_entropy, ids_of, mlp, one_step
from tests.support.oracles import assert_close

import backstory
from backstory.errors import UsageError
from backstory.replay import preference


def test_it_is_the_difference_of_two_queries(tmp_path: Path) -> None:
    model = mlp()
    optimizer = adamw(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(5):
            one_step(rec, model, optimizer, ids_of(t))
    run = backstory.open(tmp_path / "run")
    (x, y), right, wrong = batch_of([0, 1, 2]), batch_of([0, 1, 2]), batch_of([0, 1, 2])
    wrong = (x, 1 - y)
    actual = run.query(model, preference(cross_entropy), (right, wrong))
    first, second = (run.query(model, cross_entropy, batch) for batch in (right, wrong))
    assert_close(actual.scores, first.scores - second.scores, 1e-10, "-1: the other answer's loss must be taken away.")
    assert actual.n_queries == 3


def test_what_is_no_pair_is_refused() -> None:
    loss = preference(cross_entropy)
    with pytest.raises(UsageError, match=r"a pair \(preferred, other\) of batches .* got Tensor"):
        loss(mlp(), torch.zeros(2, 3))
    with pytest.raises(UsageError, match=r"as many losses, got \(2,\) and \(1,\)"):
        loss(mlp(), (batch_of([0, 1]), batch_of([0])))
