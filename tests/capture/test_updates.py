"""What is read of an optimizer at its step, against what torch's own step then does with the numbers."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backstory.capture.optimizers import OPTIMIZERS
from backstory.capture.updates import OptimizerReader, Reading
from backstory.errors import CoverageError, UnsupportedError, UsageError


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss(net: nn.Module, seed: int) -> Tensor:
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out: Tensor = net(x).square().sum()
    return out


class Watched:
    """A reader on a model, attached."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any) -> None:
        self.net, self.optimizer = net, optimizer
        self.reader = OptimizerReader(net, optimizer, **settings)

    def __enter__(self) -> "Watched":
        self.reader.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.detach()

    def step(self, seed: int = 0, max_norm: float | None = None, scale: float = 1.0) -> Reading:
        self.reader.begin()
        self.optimizer.zero_grad()
        (loss(self.net, seed) * scale).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(self.net.parameters(), max_norm)
        self.optimizer.step()
        assert self.reader.reading is not None
        return self.reader.reading


CASES: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.4},
    {"momentum": 0.8, "nesterov": True},
    {"weight_decay": 0.1, "momentum": 0.5, "dampening": 0.2},
    {"dampening": 0.5},  # torch ignores it without momentum
]


@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("settings", CASES)
def test_the_numbers_replay_torchs_own_steps(settings: dict[str, Any], max_norm: float | None) -> None:
    r"""θ ← θ − η (a m + n u), m ← μ m + (1−τ) u, u = c ∇L + λ θ, with nothing but the numbers that were read."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, **settings)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    twin = model()
    m = [torch.zeros_like(p) for p in twin.parameters()]
    with Watched(net, optimizer) as watched:
        for t in range(4):
            r = watched.step(t, max_norm)
            k = {name: values[0] for name, values in r.groups.items()}
            grads = torch.autograd.grad(loss(twin, t), list(twin.parameters()))
            assert r.norm == pytest.approx(float(torch.cat([g.flatten() for g in grads]).norm()), rel=1e-12)
            with torch.no_grad():
                for i, (p, g) in enumerate(zip(twin.parameters(), grads, strict=True)):
                    u = r.clip * g + k["l2"] * p
                    m[i] = k["momentum"] * m[i] + (1 - k["tau"]) * u
                    p.mul_(1 - k["rate"] * k["decay"]).sub_(k["rate"] * (k["a"] * m[i] + k["n"] * u))
            schedule.step()
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


def test_clipping_that_does_nothing_is_exactly_one() -> None:
    net = model()
    with Watched(net, torch.optim.SGD(net.parameters(), lr=0.01)) as watched:
        assert watched.step(0).clip == 1.0
        assert watched.step(0, max_norm=1e9).clip == 1.0
        assert watched.step(0, max_norm=0.1).clip < 0.5


@pytest.mark.parametrize("by_value", [False, True])
def test_changes_that_torch_does_not_count_are_seen(by_value: bool) -> None:
    """`p.grad.data` is an old idiom, and its changes do not show in the version of `p.grad`."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        loss(net, 0).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad.data.clamp_(-0.1, 0.1) if by_value else p.grad.data.mul_(0.5)
        if by_value:
            with pytest.raises(UnsupportedError, match="clipping by value"):
                optimizer.step()
            return
        optimizer.step()
    assert watched.reader.reading is not None
    assert watched.reader.reading.clip == pytest.approx(0.5, rel=1e-12)


def test_shares_of_the_gradient_are_those_before_clipping() -> None:
    net = model()
    twin = copy.deepcopy(net)
    loss(twin, 0).backward()
    with Watched(net, torch.optim.SGD(net.parameters(), lr=0.01)) as watched:
        reading = watched.step(0, max_norm=0.1)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        assert reading.squares[id(p)] == pytest.approx(float(q.grad.square().sum()), rel=1e-12)


def test_accumulated_gradients_are_measured_when_complete() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        for seed in (0, 1):
            loss(net, seed).backward()
        optimizer.step()
    assert watched.reader.reading is not None
    assert watched.reader.reading.clip == 1.0


def only_one_weight() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2, bias=False).double()


@pytest.mark.parametrize("make", [model, only_one_weight])
@pytest.mark.parametrize("limit", [0.1, 0.9])
def test_clipping_by_value_is_refused(make: Any, limit: float) -> None:
    """`limit` of the largest entry; one weight alone has one ratio of norms, so norms are not enough."""
    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        loss(net, 0).backward()
        largest = max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None)
        nn.utils.clip_grad_value_(net.parameters(), limit * largest)
        with pytest.raises(UnsupportedError, match=r"clip_grad_norm_ over all parameters, but not clipping by value"):
            optimizer.step()


def test_clipping_by_value_that_hardly_moves_a_norm_is_refused_within_a_round() -> None:
    """After the first steps largest entries are looked at in turn: a change that norms do not tell is found when its turn comes."""
    net = nn.Linear(40, 50)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    c = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    actual = []
    with Watched(net, optimizer) as watched:
        for step in range(6):
            watched.reader.begin()
            optimizer.zero_grad()
            ((net.weight * c).sum() + net.bias.sum()).backward()
            assert net.weight.grad is not None
            if step >= 2:  # before, both are looked at
                net.weight.grad.clamp_(-0.98 * c.abs().max(), 0.98 * c.abs().max())
            try:
                optimizer.step()
            except UnsupportedError:
                actual.append(step)
            watched.reader.end()
    assert actual == [2, 4], "never: nobody looks; always: all are looked at in every step, or norms tell it"


def test_clipping_of_some_parameters_only_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        loss(net, 0).backward()
        nn.utils.clip_grad_norm_(list(net.parameters())[:2], 0.01)
        with pytest.raises(UnsupportedError, match="or clipping only some parameters"):
            optimizer.step()


def test_gradients_that_grow_are_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        (loss(net, 0) / 8).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad *= 8
        with pytest.raises(UnsupportedError, match=r"a single factor ≤ 1 .*norm before: 8\).*pass scaler="):
            optimizer.step()


class Scaler:
    """Only what the reader needs."""

    def get_scale(self) -> float:
        return 1024.0


def test_a_loss_scale_is_taken_out_of_the_measured_gradient() -> None:
    net, plain = model(), model()
    with Watched(plain, torch.optim.SGD(plain.parameters(), lr=0.01)) as watched:
        expected = watched.step(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with Watched(net, optimizer, scaler=Scaler()) as watched:
        watched.reader.begin()
        (loss(net, 0) * 1024).backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad /= 1024
        optimizer.step()
    actual = watched.reader.reading
    assert actual is not None
    assert actual.clip == expected.clip == 1.0
    assert actual.norm == pytest.approx(
        expected.norm, rel=1e-14
    )  # 26 numbers, 5 samples, layers of 3, 4, 2: 40 × 1e-16
    assert watched.reader.loss_scale == 1024


UNKNOWN = {torch.optim.NAdam, torch.optim.Adafactor, torch.optim.RMSprop} - OPTIMIZERS.keys()


@pytest.mark.parametrize("kind", sorted(UNKNOWN, key=str))
def test_other_optimizers_are_refused_unless_taken_for_sgd(kind: Any) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=0.01, weight_decay=0.3)
    with pytest.raises(UnsupportedError, match=rf"{kind.__name__} is not supported.*optimizer_model='sgd'.*every"):
        OptimizerReader(net, optimizer)
    with Watched(net, optimizer, model_as="sgd") as watched:
        reading = watched.step()
    assert {k: v[0] for k, v in reading.groups.items()} == {
        "rate": 0.01, "l2": 0.0, "decay": 0.0, "momentum": 0.0, "tau": 0.0, "a": 1.0, "n": 0.0
    }  # fmt: skip


def test_a_child_of_sgd_may_step_otherwise_so_it_is_refused() -> None:
    class Mine(torch.optim.SGD):
        """Who knows what its step does."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Something else."""

    net = model()
    with pytest.raises(UnsupportedError, match="Mine"):
        OptimizerReader(net, Mine(net.parameters(), lr=0.1))


def test_wrong_words_are_refused() -> None:
    net = model()
    with pytest.raises(UsageError, match="optimizer_model must be one of 'auto', 'sgd', got 'adam'"):
        OptimizerReader(net, torch.optim.SGD(net.parameters(), lr=0.1), model_as="adam")


@pytest.mark.parametrize("model_as", ["auto", "sgd"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop])
def test_maximize_is_read_at_each_step(kind: Any, model_as: str) -> None:
    net = model()
    optimizer = kind(net.parameters(), lr=0.1)
    with Watched(net, optimizer, model_as=model_as) as watched:
        assert watched.step().sign == 1
        optimizer.param_groups[0]["maximize"] = True
        assert watched.step().sign == -1


def test_plain_sgd_that_gets_momentum_is_no_longer_exact_and_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watched(net, optimizer, model_as="sgd") as watched:
        watched.step(0)
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(
            UnsupportedError, match=r"plain when recording began, but now has momentum 0.9.*without optim"
        ):
            watched.step(1)


def test_coverage_counts_what_the_step_updates_and_the_share_all_that_is_clipped() -> None:
    net = model()
    _, bias, second, last = net.parameters()
    twin = copy.deepcopy(net)
    loss(twin, 0).backward()
    squares = [float(p.grad.square().sum()) for p in twin.parameters() if p.grad is not None]
    groups: list[dict[str, Any]] = [{"params": [second, last]}, {"params": [bias], "lr": 0.0}]  # the first is in none
    optimizer = torch.optim.SGD(groups, lr=0.1)
    with Watched(net, optimizer) as watched:
        reading = watched.step(0, max_norm=0.1)
    assert reading.norm == pytest.approx(sum(squares) ** 0.5, rel=1e-12)
    assert reading.share({id(second)}) == pytest.approx(squares[2] / sum(squares), rel=1e-12)
    assert reading.share({id(second)}, updated=True) == pytest.approx(squares[2] / (squares[2] + squares[3]), rel=1e-12)
    assert reading.share({id(second), id(bias), id(last)}, updated=True) == 1.0
    optimizer.param_groups[0]["lr"] = 0.0
    with Watched(net, optimizer) as watched:
        assert watched.step(0).share({id(bias)}, updated=True) == 1.0, "where nothing moves, nothing is missing"


def test_a_parameter_without_gradient_beside_others_with_momentum_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        (net.get_parameter("0.weight").sum()).backward()
        with pytest.raises(
            UnsupportedError, match=r"3 parameters of an optimizer group got no gradient.*group without momentum"
        ):
            optimizer.step()


def test_momentum_that_begins_at_different_times_in_one_group_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with Watched(net, optimizer) as watched:
        watched.step()
        optimizer.state[net.get_parameter("0.bias")].clear()
        with pytest.raises(UnsupportedError, match=r"only some parameters .* have a momentum buffer"):
            watched.step()


def test_momentum_switched_on_begins_from_nothing_and_switched_off_is_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watched(net, optimizer) as watched:
        assert watched.step(0).groups["momentum"] == [0.0]
        optimizer.param_groups[0]["momentum"] = 0.9
        assert watched.step(1).groups["momentum"] == [0.0]  # torch sets the buffer to the gradient
        assert watched.step(2).groups["momentum"] == [0.9]
        optimizer.param_groups[0]["momentum"] = 0.0
        with pytest.raises(UnsupportedError, match="momentum was set to 0"):
            watched.step(3)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"weight_decay": 0.3}])
def test_a_parameter_frozen_in_the_middle_is_refused(settings: dict[str, Any]) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, **settings)
    with Watched(net, optimizer) as watched:
        watched.step(0)
        optimizer.zero_grad()
        net.get_parameter("0.bias").requires_grad_(False)
        with pytest.raises(UnsupportedError, match="got no gradient"):
            watched.step(1)


@pytest.mark.parametrize("norm_type", [1.0, torch.inf])
def test_scaling_that_is_no_clipping_by_norm_is_refused(norm_type: float) -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def train(reader: OptimizerReader, scale: bool) -> None:
        for t in range(4):
            reader.begin()
            loss(net, t).backward()
            if scale:
                for p in net.parameters():
                    assert p.grad is not None
                    p.grad.mul_(0.5)
            else:
                nn.utils.clip_grad_norm_(net.parameters(), 0.05, norm_type=norm_type)
            optimizer.step()
            optimizer.zero_grad()

    for scale in (True, False):
        reader = OptimizerReader(net, optimizer)
        reader.attach()
        with pytest.raises(UnsupportedError, match="clip_grad_norm_ with a constant max_norm"):
            train(reader, scale)
        reader.detach()
    reader = OptimizerReader(net, optimizer, clip_norm="varies")
    reader.attach()
    train(reader, True)
    reader.detach()


def test_a_step_without_backward_and_a_second_step_are_refused() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        with pytest.raises(UsageError, match="no backward pass ran inside this"):
            optimizer.step()
        watched.step()
        with pytest.raises(UsageError, match="called twice inside one"):
            optimizer.step()


def test_a_parameter_that_joins_later_is_refused() -> None:
    net = model()
    net.get_parameter("0.bias").requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watched(net, optimizer) as watched:
        watched.step()
        net.get_parameter("0.bias").requires_grad_(True)
        with pytest.raises(
            CoverageError, match=r"1 parameters \(the first has shape \(4,\)\) are trained now.*new run"
        ):
            watched.step()


def test_reading_leaves_nothing_in_the_optimizer() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with Watched(net, optimizer) as watched:
        watched.step()
    assert dict(optimizer.state) == {}
    assert not optimizer._optimizer_step_pre_hooks
    assert all(not p._post_accumulate_grad_hooks for p in net.parameters())
