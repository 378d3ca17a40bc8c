"""TSLOO averaged over seeds."""

from functools import partial

import pytest
import torch
from experiments.small.expected import expected_loo
from tests.support import examples
from tests.support.oracles import assert_same

from backstory.errors import UsageError
from backstory.exact.leave_out import leave_out
from backstory.replay.tape import Removal


def test_mean_and_error_over_seeds() -> None:
    seeds = (3, 4, 5)
    found = expected_loo(lambda s: examples.make("adam", seed=s), seeds, 2, "q")
    rows = torch.stack([leave_out(partial(examples.make, "adam", seed=s), [Removal((2,))], "q")[0] for s in seeds])
    torch.testing.assert_close(found.values, rows)
    torch.testing.assert_close(found.mean, rows.mean(0))
    torch.testing.assert_close(found.error, rows.std(0) / 3**0.5)
    assert found.as_dict()["seeds"] == [3, 4, 5]


def test_a_named_recipe_is_given_the_seed() -> None:
    by_name = expected_loo(examples.NAME, (0, 1), Removal((2,), share=0.5), "q", args={"optimizer": "momentum"})
    by_call = expected_loo(lambda s: examples.make("momentum", seed=s), (0, 1), Removal((2,), share=0.5), "q")
    assert_same(by_name.values, by_call.values, examples.TERMS, size=1.0)  # differences of losses of about 1
    assert not torch.equal(by_name.values[0], by_name.values[1])


def test_one_seed_has_no_error() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        expected_loo(examples.NAME, (0,), 2, "q")
