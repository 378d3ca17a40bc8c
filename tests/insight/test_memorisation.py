"""Ranks of a query's own sample, counted one by one."""

import numpy as np
import pytest
import torch
from tests.insight.runs import Small, loss
from tests.support.loops import batch_of

from backstory.errors import UsageError
from backstory.insight.memorisation import memorisation, memorisation_of
from backstory.results.influence import Influence


def test_ranks_are_counted(plain: Small) -> None:
    ids = [3, 7, 0, 8]
    actual = memorisation(plain.run, plain.model, loss, batch_of(ids), ids)
    answer = plain.run.query(plain.model, loss, batch_of(ids))
    own = [float(answer.sum_over([i])[q]) for q, i in enumerate(ids)]
    np.testing.assert_allclose(actual.influence, own, rtol=1e-9)
    for q, sample in enumerate(ids):
        ranked = [h.sample for h in answer.top(9, query=q)]
        assert actual.rank[q] == 1 + ranked.index(sample)
    assert actual.share_first == np.mean([r == 1 for r in actual.rank])
    assert actual.median_rank == np.median(actual.rank)
    assert actual.samples == 9
    assert actual.ids == (3, 7, 0, 8)


def test_any_answer_can_be_ranked(plain: Small) -> None:
    ids = [2, 5]
    answer = plain.run.query(plain.model, loss, batch_of(ids))
    assert (
        memorisation_of(answer, ids).rank.tolist()
        == memorisation(plain.run, plain.model, loss, batch_of(ids), ids).rank.tolist()
    )


def test_only_the_first_is_first() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0], [3.0, 1.0, 2.0]], dtype=torch.float64)
    answer = Influence(scores, np.array(["a", "b", "c"]), np.array([0, 1, 2]), "str", "adjoint", at=3)
    actual = memorisation_of(answer, ["a", "b", "c"])
    assert actual.rank.tolist() == [1, 3, 2]
    assert actual.influence.tolist() == [3, 1, 2]
    assert actual.share_first == pytest.approx(1 / 3)
    assert actual.median_rank == 2


def test_an_answer_in_plain_values(plain: Small) -> None:
    actual = memorisation(plain.run, plain.model, loss, batch_of([1, 2]), [1, 2])
    assert actual.as_dict()["samples"] == 9
    assert 0 <= actual.as_dict()["share_first"] <= 1
    assert len(actual.to_pandas()) == 2
    assert "first in" in actual.headline


def test_ids_must_fit(plain: Small) -> None:
    with pytest.raises(UsageError, match="2 losses for 1 ids"):
        memorisation(plain.run, plain.model, loss, batch_of([1, 2]), [1])
    with pytest.raises(UsageError, match="'77' was never used"):
        memorisation(plain.run, plain.model, loss, batch_of([1]), [77])
