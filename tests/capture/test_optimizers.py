"""The table of optimizers: by type, by what a subclass inherits, and people's own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import FULL, batch_of, cross_entropy, ids_of, mlp, one_step
from tests.support.oracles import assert_same
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import backstory
from backstory.capture import optimizers
from backstory.capture.optimizers import OPTIMIZERS, SecondMoment, StepCoefficients, dropped, rule_of
from backstory.errors import MismatchError, UnsupportedError, UsageError
from backstory.recording.from_checkpoints import Given, record_checkpoints
from backstory.replay.recipe import take_step

STEPS = 6


class HeavyBall(Optimizer):
    """SGD with momentum 0.8 as somebody writes it by hand, with a buffer of another name."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                ball = self.state[p].setdefault("ball", torch.zeros_like(p))
                ball.mul_(0.8).add_(p.grad)
                p.sub_(group["lr"] * ball)


def read(optimizer: Optimizer, group: Any) -> StepCoefficients:
    return StepCoefficients(rate=group["lr"], momentum=0.8)


@pytest.fixture
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is before anything is registered, and again afterwards."""
    monkeypatch.setattr(optimizers, "OPTIMIZERS", dict(OPTIMIZERS))


def scores(path: Path, kind: Any, **settings: Any) -> Tensor:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.1, **settings)
    with backstory.record(model, optimizer, path, loss_reduction="mean", **FULL) as rec:
        for t in range(STEPS):
            one_step(rec, model, optimizer, ids_of(t))
    return backstory.open(path).query(model, cross_entropy, batch_of([0, 1, 2])).scores


@pytest.mark.usefixtures("_table")
def test_a_registered_optimizer_is_followed_as_it_steps(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"HeavyBall is not supported.*register_optimizer"):
        scores(tmp_path / "refused", HeavyBall)
    backstory.register_optimizer(HeavyBall, read)
    actual, expected = scores(tmp_path / "own", HeavyBall), scores(tmp_path / "torch", SGD, momentum=0.8)
    assert_same(actual, expected, STEPS * 100)
    backstory.register_optimizer(HeavyBall, lambda optimizer, group: StepCoefficients(rate=group["lr"]))
    assert (scores(tmp_path / "wrong", HeavyBall) - expected).norm() > 0.01 * expected.norm()


class Named(AdamW):
    """Steps as AdamW does."""


class Other(SGD):
    """Steps in a way of its own."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Twice."""
        super().step()
        super().step()


@pytest.mark.usefixtures("_table")
def test_a_subclass_is_what_it_inherits_its_step_from() -> None:
    parameter = [torch.nn.Parameter(torch.ones(2))]
    assert rule_of(Named(parameter)) is OPTIMIZERS[AdamW]
    assert rule_of(Other(parameter, lr=0.1)) is None
    backstory.register_optimizer(Other, read)
    assert rule_of(Other(parameter, lr=0.1)) is not None
    backstory.register_optimizer(Other, SGD)
    assert rule_of(Other(parameter, lr=0.1)) is OPTIMIZERS[SGD]
    with pytest.raises(UsageError, match="Muon is not supported itself"):
        backstory.register_optimizer(Other, torch.optim.Muon)


class Lion(HeavyBall):
    """By the sign."""


@pytest.mark.parametrize(
    ("kind", "why"),
    [(Lion, "derivative is 0 almost everywhere"), (torch.optim.Muon, "orthogonalises"), (torch.optim.Rprop, "sign")],
)
def test_what_no_diagonal_follows_is_refused_with_the_reason(kind: Any, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{why}.*optimizer_model='sgd'.*run.leave_out"):
        optimizers.checked_rule(kind([torch.nn.Parameter(torch.ones(2, 2))], lr=0.1))


class OwnAdam(Optimizer):
    """AdamW without decay as somebody writes it by hand, with a state of other names."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                t = state["t"] = state.get("t", 0) + 1
                m = state.setdefault("mean", torch.zeros_like(p)).mul_(0.8).add_(p.grad, alpha=0.2)
                v = state.setdefault("squares", torch.zeros_like(p)).mul_(0.9).add_(p.grad.square(), alpha=0.1)
                p.sub_(group["lr"] * m / (1 - 0.8**t) / ((v / (1 - 0.9**t)).sqrt() + 1e-6))


def read_own(optimizer: Optimizer, group: Any) -> StepCoefficients:
    t = 1 + optimizer.state.get(group["params"][0], {}).get("t", 0)
    return StepCoefficients(rate=group["lr"], momentum=0.8, tau=0.8, a=1 / (1 - 0.8**t))


def own_moment(optimizer: Optimizer, group: Any, p: Tensor) -> SecondMoment:
    state = optimizer.state[p]
    return SecondMoment(state["squares"], 1e-6, 1 - 0.9 ** state["t"], min(state["t"], 10))


def from_checkpoints(path: Path, kind: Any, nearest: str, states: bool, **settings: Any) -> backstory.Run:
    """A run made from the checkpoints of two of its steps and its end."""

    def recipe() -> backstory.Recipe:
        model = mlp()
        batches = [(ids_of(t), batch_of(ids_of(t))) for t in range(STEPS)]
        optimizer = kind(model.parameters(), lr=0.03, **settings)
        return backstory.Recipe(model=model, optimizer=optimizer, loss=cross_entropy, batches=batches)

    trained, given = recipe(), list[Given]()
    for t in range(STEPS):
        take_step(trained, t)
        if t + 1 in (2, 5, STEPS):
            weights, state = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
            given.append((t + 1, weights, state if states else None))
    return record_checkpoints(recipe(), given, path, nearest=nearest, projection="full", encoding="float64")


@pytest.mark.usefixtures("_table")
@pytest.mark.parametrize(("nearest", "states"), [("after", True), ("before", True), ("after", False)])
def test_checkpoints_of_a_registered_optimizer_are_read_by_its_reader(
    nearest: str, states: bool, tmp_path: Path
) -> None:
    backstory.register_optimizer(OwnAdam, read_own, own_moment)
    torchs = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}
    own = from_checkpoints(tmp_path / "own", OwnAdam, nearest, states)
    expected = from_checkpoints(tmp_path / "torch", AdamW, nearest, states, **torchs)
    a, b = (run._store.diagonal(0, STEPS) for run in (own, expected))
    assert a is not None
    assert b is not None
    assert_same(a, b, STEPS * 100, dtype=torch.float32)
    for name, values in expected.steps().groups.items():
        assert own.steps().groups[name] == pytest.approx(values, rel=1e-12), name
    assert any(note.startswith("OwnAdam's second moment") for note in own.caveats())


@pytest.mark.usefixtures("_table")
def test_a_state_without_the_second_moment_that_the_reader_wants_is_refused(tmp_path: Path) -> None:
    backstory.register_optimizer(OwnAdam, read_own, lambda optimizer, group, p: optimizer.state[p]["missing"])
    with pytest.raises(MismatchError, match="step 2 lacks OwnAdam's second moment"):
        from_checkpoints(tmp_path, OwnAdam, "after", True)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (torch.optim.SGD, {}, []),
        (torch.optim.SGD, {"dampening": 0.5}, []),  # torch ignores it without momentum
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}, ["momentum 0.9", "Nesterov", "weight decay 0.0005"]),
        (torch.optim.AdamW, {}, ["AdamW's second moment", "momentum 0.9", "weight decay 0.01"]),
        (torch.optim.Adam, {"betas": (0.0, 0.9)}, ["Adam's second moment"]),
        (torch.optim.RMSprop, {"momentum": 0.5}, ["RMSprop's second moment", "momentum 0.5"]),
        (torch.optim.Adafactor, {}, ["Adafactor's second moment"]),
        (torch.optim.Adamax, {}, ["Adamax's own update rule", "momentum 0.9"]),
    ],
)  # fmt: skip
def test_what_a_proxy_drops_is_read_from_the_optimizer(
    kind: Any, settings: dict[str, Any], expected: list[str]
) -> None:
    assert dropped(kind(mlp().parameters(), lr=0.1, **settings)) == expected


def test_what_differs_between_groups_is_a_range() -> None:
    groups = [{"params": p, "momentum": mu} for p, mu in zip(mlp().parameters(), (0.0, 0.5, 0.9, 0.5), strict=True)]
    assert dropped(torch.optim.SGD(groups, lr=0.1)) == ["momentum 0 to 0.9"]


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(UsageError, match="must be a subclass of"):
        backstory.register_optimizer(torch.nn.Linear, read)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize(
    "settings", [{}, {"projection": "random", "rank": 2, "encoding": "float64"}], ids=["full", "random"]
)
def test_maximizing_minus_the_loss_is_minimizing_it(kind: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    results = []
    for sign in (1.0, -1.0):
        model = mlp()
        optimizer = kind(model.parameters(), lr=0.1, maximize=sign < 0)
        path = tmp_path / str(sign)
        with backstory.record(model, optimizer, path, loss_reduction="mean", **{**FULL, **settings}) as rec:
            for t in range(STEPS):
                optimizer.zero_grad()
                with rec.step(ids_of(t)):
                    (sign * cross_entropy(model, batch_of(ids_of(t)))).mean().backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
        results.append(backstory.open(path).query(model, cross_entropy, batch_of([0, 1, 2])).scores)
    assert results[0].norm() > 0
    assert_same(results[1], results[0], STEPS * 100)


SCALED: dict[Any, dict[str, Any]] = {
    torch.optim.NAdam: {},
    torch.optim.RAdam: {"betas": (0.9, 0.9)},
    torch.optim.RMSprop: {"momentum": 0.5, "alpha": 0.9},
    torch.optim.Adagrad: {"initial_accumulator_value": 0.1},
    torch.optim.Adafactor: {"eps": (None, 1e-2)},
}


@pytest.mark.parametrize("kind", SCALED)
def test_a_run_of_a_scaled_optimizer_is_recorded_and_queried(kind: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"curvature": "empirical", "projection": "random", "rank": 2, "encoding": "float64"}
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.05, **SCALED[kind])
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **settings) as rec:
        for t in range(STEPS):
            one_step(rec, model, optimizer, ids_of(t))
    run = backstory.open(tmp_path / "run")
    result = run.query(model, cross_entropy, batch_of([0, 1, 2]))
    assert bool(result.scores.isfinite().all())
    assert float(result.scores.norm()) > 0
    assert run.steps().drift[1:].min() >= 0


def test_rmsprops_momentum_needs_coordinates_that_hold_its_scale(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"RMSprop's momentum averages steps that are scaled already.*learned"):
        scores(tmp_path, torch.optim.RMSprop, momentum=0.5)
    assert scores(tmp_path, torch.optim.RMSprop).norm() > 0
