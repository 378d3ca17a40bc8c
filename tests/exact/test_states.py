"""States on disk come back as they were."""

from typing import Any

import torch

from backstory.exact.derivative import State
from backstory.exact.states import States, affordable, flat_state
from backstory.replay.update import Slots


def test_states_come_back_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    whole: dict[str, Any] = {
        "m": {"w": torch.randn(3, 2, generator=g), "n": torch.tensor(7)},
        "o": [(1, "x", None)],
        "s": None,
    }
    half = State(torch.randn(5, generator=g).bfloat16(), torch.zeros(()).expand(5), torch.empty(0))
    states = States()
    states[4], states[2] = whole, half
    assert sorted(states) == [2, 4]
    back, small = states[4], states[2]
    assert torch.equal(back["m"]["w"], whole["m"]["w"])
    assert back["m"]["n"].item() == 7
    assert (back["o"], back["s"]) == ([(1, "x", None)], None)
    assert torch.equal(small.theta, half.theta)
    assert small.m.tolist() == [0] * 5
    assert small.v.shape == (0,)
    states.close()
    assert isinstance(small, State)


def test_a_single_number_that_stands_for_many_comes_back_in_every_shape() -> None:
    """A model of one coordinate: there torch calls a tensor contiguous that it cannot view as bytes."""
    one, states = torch.tensor([2.5, 3.0])[1:], States()
    for k, x in enumerate([one[0], one[0].expand(1), one.expand(1, 1), one[None], one.expand(3, 1), one.expand(1, 2)]):
        states[k] = x
        assert torch.equal(states[k], x)
    states.close()


def test_the_room_is_used_again() -> None:
    states = States()
    for _ in range(5):
        states[0], states[1] = torch.ones(1000), torch.ones(1000)
        states.clear()
    states[3] = torch.ones(4)
    assert states._end == 16
    states.close()


def test_what_is_not_kept_is_one_zero() -> None:
    theta = (torch.ones(2, 2), torch.ones(3))
    none = (torch.zeros(()), torch.zeros(()))
    state = flat_state(Slots(theta, none, theta))
    assert state.theta.tolist() == [1] * 7
    assert state.m.tolist() == [0] * 7
    assert state.m.stride() == (0,)
    assert state.v.tolist() == [1] * 7
    assert affordable(state) * 56 <= affordable(state._replace(v=state.m)) * 28 + 56
