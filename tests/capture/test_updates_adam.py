"""What is read of Adam and AdamW at a step, against what torch's own step then does with the numbers."""

from typing import Any

import pytest
import torch
from tests.capture.test_updates import Watched, loss, model
from torch import Tensor, nn

from backstory.capture.updates import OptimizerReader, Reading
from backstory.errors import UnsupportedError

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1}),
    "AdamW, amsgrad": (torch.optim.AdamW, {"weight_decay": 0.1, "amsgrad": True}),
    "AdamW, foreach": (torch.optim.AdamW, {"foreach": True}),
    "AdamW, fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "Adam": (torch.optim.Adam, {}),
    "Adam, L2": (torch.optim.Adam, {"weight_decay": 0.2}),
    "Adam, decoupled": (torch.optim.Adam, {"weight_decay": 0.2, "decoupled_weight_decay": True}),
    "Adam, no first moment": (torch.optim.Adam, {"betas": (0.0, 0.9)}),
    "Adam, maximize": (torch.optim.Adam, {"maximize": True}),
    "NAdam": (torch.optim.NAdam, {"momentum_decay": 0.3}),
    "NAdam, L2": (torch.optim.NAdam, {"weight_decay": 0.2, "foreach": True}),
    "NAdam, decoupled": (torch.optim.NAdam, {"weight_decay": 0.2, "decoupled_weight_decay": True, "maximize": True}),
    "RAdam": (torch.optim.RAdam, {}),
    "RAdam, rectified": (torch.optim.RAdam, {"betas": (0.8, 0.7), "weight_decay": 0.2}),
    "RAdam, decoupled": (torch.optim.RAdam, {"weight_decay": 0.2, "decoupled_weight_decay": True, "foreach": True}),
    "RMSprop": (torch.optim.RMSprop, {"betas": None, "alpha": 0.9, "weight_decay": 0.2}),
    "RMSprop, centered": (torch.optim.RMSprop, {"betas": None, "alpha": 0.9, "centered": True, "maximize": True}),
    "RMSprop, momentum": (torch.optim.RMSprop, {"betas": None, "alpha": 0.9, "momentum": 0.7, "centered": True}),
    "Adagrad": (torch.optim.Adagrad, {"betas": None, "lr_decay": 0.2, "weight_decay": 0.2}),
    "Adagrad, begun": (torch.optim.Adagrad, {"betas": None, "initial_accumulator_value": 0.3}),
    "Adafactor": (torch.optim.Adafactor, {"betas": None, "eps": (None, 1e-3), "weight_decay": 0.2}),
    "Adafactor, bounded": (torch.optim.Adafactor, {"betas": None, "eps": (None, 5.0), "d": 1.0, "maximize": True}),
    "Adafactor, late": (torch.optim.Adafactor, {"betas": None, "eps": (1e-3, 1e-3), "lr": 0.9}),
}
M = ("exp_avg", "momentum_buffer")  # what torch calls m


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.parametrize("name", KINDS)
def test_the_numbers_replay_torchs_own_steps(name: str, max_norm: float | None, before: int) -> None:
    r"""θ ← (1 − ηλ') θ − η P (a m + n u), m ← μ m + (1−τ) u, u = ± c ∇L + λ θ, with nothing but the numbers that were read."""
    net, twin = model(), model()
    kind, settings = KINDS[name]
    given = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, **settings}
    optimizer = kind(net.parameters(), **{k: x for k, x in given.items() if x is not None})
    for t in range(before):
        optimizer.zero_grad()
        loss(net, 30 + t).backward()
        optimizer.step()
    twin.load_state_dict(net.state_dict())
    states = [optimizer.state.get(p, {}) for p in net.parameters()]
    m = [
        next((s[n].clone() for n in M if s.get(n) is not None), torch.zeros_like(p))
        for s, p in zip(states, net.parameters(), strict=True)
    ]
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    with Watched(net, optimizer) as watched:
        assert watched.reader.adaptive
        for t in range(4):
            r = watched.step(t, max_norm)
            k = {name: values[0] for name, values in r.groups.items()}
            grads = torch.autograd.grad(loss(twin, t), list(twin.parameters()))
            with torch.no_grad():
                for i, (p, q, g) in enumerate(zip(twin.parameters(), net.parameters(), grads, strict=True)):
                    v, eps, correction, _ = watched.reader.second_moment(q)
                    P = 1 / ((v / correction).sqrt() + eps)
                    u = r.sign * r.clip * g + k["l2"] * p
                    early, late = (P, 1.0) if watched.reader.inside else (1.0, P)
                    m[i] = k["momentum"] * m[i] + (1 - k["tau"]) * u * early
                    moved = (k["a"] * m[i] + k["n"] * u) * late
                    p.mul_(1 - k["rate"] * k["decay"]).sub_(k["rate"] * moved)
            schedule.step()
            for p, q in zip(net.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-13)


def test_groups_are_read_one_by_one() -> None:
    net = model()
    first, second = list(net.parameters())[:2], list(net.parameters())[2:]
    optimizer = torch.optim.AdamW(
        [{"params": first, "betas": (0.5, 0.9), "eps": 0.1}, {"params": second, "weight_decay": 0.0}],
        lr=0.1,
        amsgrad=True,
    )
    with Watched(net, optimizer) as watched:
        watched.step(0)
        r = watched.step(1)
    assert r.groups["momentum"] == r.groups["tau"] == [0.5, 0.9]
    assert r.groups["a"] == pytest.approx([1 / (1 - 0.25), 1 / (1 - 0.81)], rel=1e-14)
    assert r.groups["decay"] == [0.01, 0.0]
    assert watched.reader.second_moment(first[0])[1] == 0.1
    assert watched.reader.second_moment(second[0])[1] == 1e-8


def test_the_hook_after_the_update_sees_moved_weights_and_the_gradients() -> None:
    net = model()
    seen: list[tuple[Reading, bool, Tensor | None]] = []
    with Watched(net, torch.optim.AdamW(net.parameters())) as watched:
        weight = net.get_parameter("0.weight")
        start = weight.detach().clone()
        watched.reader.on_stepped = lambda r: seen.append((r, torch.equal(weight, start), weight.grad))
        reading = watched.step(0)
    ((actual, unmoved, grad),) = seen
    assert actual is reading
    assert not unmoved
    assert grad is not None


def test_parameters_that_join_later_need_a_group_of_their_own() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    net.get_parameter("2.bias").grad = None
    optimizer.step()
    with (
        pytest.raises(
            UnsupportedError,
            match=r"different step counts: \[0.0, 1.0\]. Put parameters that join later into their own group",
        ),
        Watched(net, optimizer) as watched,
    ):
        watched.step(0)


def test_a_parameter_without_gradient_is_refused() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    with Watched(net, optimizer) as watched:
        watched.reader.begin()
        loss(net, 0).backward()
        net.get_parameter("2.bias").grad = None
        with pytest.raises(UnsupportedError, match=r"1 parameters .* got no gradient .*Freeze them before recording"):
            optimizer.step()


def test_the_proxy_takes_adam_for_sgd() -> None:
    net = model()
    with Watched(net, torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.3), model_as="sgd") as watched:
        assert not watched.reader.adaptive
        actual = watched.step()
    assert {k: v[0] for k, v in actual.groups.items()} == {
        "rate": 0.01, "l2": 0.0, "decay": 0.0, "momentum": 0.0, "tau": 0.0, "a": 1.0, "n": 0.0
    }  # fmt: skip


def test_a_child_of_adamw_and_groups_of_two_signs_are_refused() -> None:
    class Mine(torch.optim.AdamW):
        """Who knows what its step does."""

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            """Something else."""

    net = model()
    with pytest.raises(UnsupportedError, match=r"Mine is .* subclass of AdamW with a step\(\) of its own"):
        OptimizerReader(net, Mine(net.parameters()))
    groups = [{"params": [p], "maximize": p.dim() > 1} for p in net.parameters()]
    with pytest.raises(UnsupportedError, match=r"some parameter groups .* maximize the loss and others minimize it"):
        OptimizerReader(net, torch.optim.AdamW(groups))


def scaled_step(fused: bool, unscale: bool, bad: bool) -> tuple[Watched, nn.Module]:
    net = model().float()
    optimizer = torch.optim.AdamW(net.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    with Watched(net, optimizer, scaler=scaler) as watched:
        scaler.scale(torch.ones(()))  # the scale is made at its first use
        watched.reader.begin()
        scaler.scale(net(torch.ones(2, 3)).square().sum() * (torch.inf if bad else 1.0)).backward()
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
    return watched, net


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_not_read(fused: bool) -> None:
    watched, net = scaled_step(fused, unscale=True, bad=True)
    assert watched.reader.reading is None
    assert all(bool(p.isfinite().all()) for p in net.parameters())
    assert scaled_step(fused, unscale=True, bad=False)[0].reader.reading is not None


@pytest.mark.parametrize("bad", [False, True])
def test_gradients_that_a_fused_step_unscales_by_itself_are_refused(bad: bool) -> None:
    with pytest.raises(
        UnsupportedError, match=r"unscales gradients inside its own step.*Call scaler.unscale_\(optimizer\) before"
    ):
        scaled_step(fused=True, unscale=False, bad=bad)
