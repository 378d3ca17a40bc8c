"""The costs of the exact ways, against what was measured."""

import pytest

from backstory.exact import costs

MEASURED = {1: 4.4, 4: 10.3, 16: 34.2}  # trainings, of a reverse sweep for so many queries


@pytest.mark.parametrize("queries", MEASURED)
def test_a_reverse_sweep(queries: int) -> None:
    assert costs.reverse(queries) == pytest.approx(MEASURED[queries], rel=0.05)


def test_blocks_of_queries_share_a_replay_and_late_steps_cost_less() -> None:
    assert costs.reverse(32) == 2 * costs.reverse(16)
    assert costs.reverse(17) - costs.reverse(16) == pytest.approx(costs.reverse(1))
    assert costs.REPLAY < costs.reverse(1, 1 / 3) < costs.reverse(1)


def test_groups() -> None:
    assert costs.leave_out(8) == 12  # eight trainings, three twins and one replay
    assert costs.leave_out(8, 0.5) == 8
    assert 9 <= costs.tangent(8) <= 13
