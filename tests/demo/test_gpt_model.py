"""The small GPT: what it sees, and what its losses are."""

import math

import pytest
import torch

from backstory.demo.gpt_model import GPT, token_losses, warmup_cosine


def model() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT(vocabulary=11, length=6, layers=2, width=8, heads=2).double()


def tokens(n: int = 3) -> torch.Tensor:
    return torch.randint(11, (n, 7), generator=torch.Generator().manual_seed(1))


def test_a_position_sees_nothing_of_what_follows() -> None:
    net, x = model(), tokens()[:, :-1]
    changed = x.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 11
    before, after = net(x), net(changed)
    assert torch.allclose(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])


def test_a_position_sees_what_came_before() -> None:
    net, x = model(), tokens()[:, :-1]
    changed = x.clone()
    changed[:, 0] = (changed[:, 0] + 1) % 11
    assert (net(x)[:, 5] - net(changed)[:, 5]).abs().max() > 1e-6


def test_equal_tokens_at_different_positions_differ() -> None:
    actual = model()(torch.zeros(1, 6, dtype=torch.int64))[0]
    assert (actual[0] - actual[5]).abs().max() > 1e-6


def test_losses_are_those_of_the_next_token() -> None:
    net, x = model(), tokens()
    logits, actual = net(x[:, :-1]), token_losses(net, x)
    assert actual.shape == (3, 6)
    for b, s in ((0, 0), (2, 5)):
        p = torch.softmax(logits[b, s], 0)[x[b, s + 1]].item()
        assert actual[b, s].item() == pytest.approx(-math.log(p), rel=1e-12)


def test_the_rate_warms_up_and_ends_at_a_tenth() -> None:
    rates = [warmup_cosine(t, 100) for t in range(100)]
    assert rates[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
