"""The influence on the mean loss of a query set."""

import torch
from tests.insight.runs import Small, loss

from backstory.insight.mean import mean_influence


def test_the_mean_influence_is_the_mean_of_the_answers(plain: Small) -> None:
    actual = mean_influence(plain.run, plain.model, loss, plain.queries)
    expected = plain.run.query(plain.model, loss, plain.queries).scores.mean(0)
    torch.testing.assert_close(actual.scores[0], expected, rtol=1e-9, atol=1e-14)
    assert actual.n_queries == 1
