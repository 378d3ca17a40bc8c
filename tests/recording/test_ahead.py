"""Rows that are projected while the backward pass goes on, in the scales of the step before: the same, whenever they are."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.run.test_run_adam import next_token, sequences
from tests.support import adam
from tests.support.adam import Tiny, adamw, met, projected
from tests.support.loops import batch_of, cross_entropy, ids_of, mlp, seeded, stored
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.recording import contributions
from backstory.recording.adam import KNOWN
from backstory.store import Writer

STEPS = KNOWN + 4
RANDOM: dict[str, Any] = {"projection": "random", "rank": 2}
SHARED: dict[str, Any] = {"loss_reduction": "mean", "curvature": "empirical/2", "tokens": 1}


@pytest.fixture(params=[0, 1 << 60], ids=["in pieces", "at once"])
def piece(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Every contribution is handed over by itself, or none before the step is complete."""
    size: int = request.param
    monkeypatch.setattr(contributions, "PIECE", size)
    return size


def halves(seen: list[adam.Seen]) -> list[Tensor]:
    """P^½ of the rows of each step: its own at first, then that of the step before."""
    own = [s.half for s in seen]
    return [own[t] if t < KNOWN else own[t - 1] for t in range(len(own))]


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_rows_have_the_scales_that_are_known_before_the_step(max_norm: float | None, tmp_path: Path) -> None:
    model = mlp()
    seen = adam.record(tmp_path / "run", model, adamw(model), STEPS, max_norm=max_norm, micro=3, **RANDOM)
    actual, half = stored(tmp_path / "run"), halves(seen)
    rows = [projected(s.rows * h, model, tmp_path / "run") for s, h in zip(seen, half, strict=True)]
    assert_close(actual.rows, torch.cat(rows), 1e-9)
    sizes = [float((s.whole * h).square().sum()) for s, h in zip(seen, half, strict=True)]
    np.testing.assert_allclose(actual.table.size, sizes, rtol=1e-9)
    if max_norm is not None:
        assert (actual.table.clip < 1).all()
        seen = [s._replace(half=h) for s, h in zip(seen, half, strict=True)]
        dots = [met(s.rows, s, t, model, tmp_path / "run") for t, s in enumerate(seen)]
        assert_close(actual.gdot, torch.cat(dots), 1e-9)


def late_token(optimizer: torch.optim.Optimizer, step: int) -> Callable[[Any], Any]:
    """Batches whose token 7 comes first in this step."""

    def batch(ids: Any) -> Any:
        tokens = sequences(ids)[0].clamp_max(6)
        taken = [int(state["step"]) for state in optimizer.state.values()]
        if taken and taken[0] >= step:
            tokens[:, 0] = 7
        return (tokens,)

    return batch


@pytest.mark.usefixtures("piece")
@pytest.mark.parametrize("groups", [1, 2])
def test_a_token_that_comes_late_has_a_row(groups: int, tmp_path: Path) -> None:
    """Its second moment was 0 before: the scale of its row is that after the step."""
    model, late = seeded(Tiny()), KNOWN + 2
    optimizer, path = adamw(model), tmp_path / "run"
    form: dict[str, Any] = {
        "curvature": "empirical" if groups == 1 else "empirical/2",
        "curvature_of": "steps",
        "tokens": 1,
    }
    batch = late_token(optimizer, late)
    seen = adam.record(path, model, optimizer, STEPS, losses=next_token, batch=batch, **RANDOM, **form)
    table, token = slice(0, 9 * 4), slice(7 * 4, 8 * 4)  # of the embedding, the first parameter
    assert [bool((s.half[token] == 0).all()) for s in seen] == [t < late for t in range(STEPS)]
    assert bool((seen[late].rows[:, token] != 0).any())
    half = [h.clone() for h in halves(seen)]
    for t in range(KNOWN, STEPS):
        half[t][table] = seen[t].half[
            table
        ]  # a table's are those after the step: a row may be the first in a long time
    expected = [projected(s.rows * h, model, path) for s, h in zip(seen, half, strict=True)]
    assert_close(stored(path).rows, torch.cat(expected), 1e-9)


@pytest.mark.usefixtures("piece")
def test_a_table_has_the_scales_after_the_step(tmp_path: Path) -> None:
    """A row that comes again after a long time had a second moment that had faded, and would weigh too much."""
    model, path = seeded(Tiny()), tmp_path / "run"
    optimizer = adamw(model)

    def batch(ids: Any) -> Any:
        (tokens,) = sequences(ids)
        taken = max((int(state["step"]) for state in optimizer.state.values()), default=0)
        if taken in (0, KNOWN + 2):
            tokens[:, :2] = torch.tensor([7, 8])
        return (tokens,)

    seen = adam.record(path, model, optimizer, STEPS, losses=next_token, batch=batch, **RANDOM)
    assert bool((seen[KNOWN - 1].half[:36] > 0).all()), "no row is without a gradient"
    half = [h.clone() for h in halves(seen)]
    for t in range(KNOWN, STEPS):
        half[t][:36] = seen[t].half[:36]
    expected = [projected(s.rows * h, model, path) for s, h in zip(seen, half, strict=True)]
    assert_close(stored(path).rows, torch.cat(expected), 1e-9)


class Blocked(nn.Module):
    """A layer whose second input is 0 until some step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(3, 4), nn.Linear(4, 4)
        self.open = False

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tensor([1.0, float(self.open), 1.0], dtype=x.dtype)
        out: Tensor = self.out(self.first(x * seen).tanh())
        return out


@pytest.mark.usefixtures("piece")
def test_a_first_gradient_that_comes_late_has_a_scale(tmp_path: Path) -> None:
    """A column of a weight without any gradient so far: its scale was 0."""
    model, late = seeded(Blocked()), KNOWN + 2
    optimizer = adamw(model)
    model.register_forward_pre_hook(
        lambda module, _: setattr(
            module, "open", max((int(s["step"]) for s in optimizer.state.values()), default=0) >= late
        )
    )
    seen = adam.record(tmp_path / "run", model, optimizer, STEPS, **RANDOM)
    weight = slice(0, 12)  # of the first layer
    assert [bool((s.half[weight] == 0).any()) for s in seen] == [t < late for t in range(STEPS)]
    half = [h.clone() for h in halves(seen)]
    for t in range(KNOWN, late + 1):
        half[t][weight] = seen[t].half[weight]
    expected = [projected(s.rows * h, model, tmp_path / "run") for s, h in zip(seen, half, strict=True)]
    assert_close(stored(tmp_path / "run").rows, torch.cat(expected), 1e-9)


def test_work_of_a_step_that_failed_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it held may change: nothing of it is looked at."""
    monkeypatch.setattr(contributions, "PIECE", 0)
    model = mlp()
    optimizer = adamw(model)
    put, held, failing = Writer.put_ahead, list[Any](), False

    def kept(self: Writer, step: int, work: Any, nbytes: int) -> None:
        if failing:
            held.append(work)
        else:
            put(self, step, work, nbytes)

    monkeypatch.setattr(Writer, "put_ahead", kept)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **RANDOM) as rec:
        for t in range(STEPS):
            failing = t == KNOWN + 1
            optimizer.zero_grad()
            with pytest.raises(ZeroDivisionError) if failing else nullcontext(), rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                if failing:
                    raise ZeroDivisionError
                optimizer.step()
        assert held
        for work in held:
            for part in (one.part for parts in work.args[0].values() for one in parts):
                part[-1].add_(1.0)
            work()
    assert backstory.open(tmp_path / "run").n_steps == STEPS - 1


def test_it_makes_no_difference_when_they_are_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of sequences, clipped steps, a learned projection, a tied table: bit for bit."""
    handed, put = list[int](), Writer.put_ahead

    def counted(self: Writer, step: int, work: Callable[[], None], nbytes: int) -> None:
        handed.append(step)
        put(self, step, work, nbytes)

    monkeypatch.setattr(Writer, "put_ahead", counted)
    for name, size in (("pieces", 0), ("once", 1 << 60)):
        monkeypatch.setattr(contributions, "PIECE", size)
        model = seeded(Tiny(tied=True))
        settings = {"projection": "learned", "rank": 2, "warmup_steps": 3, **SHARED}
        adam.record(
            tmp_path / name, model, adamw(model), STEPS, losses=next_token, batch=sequences, max_norm=0.2, micro=3,
            **settings,
        )  # fmt: skip
        assert (len(handed) > 0) == (size == 0)
        assert set(handed) <= set(range(KNOWN, STEPS))
        handed.clear()
    one, other = (backstory.open(tmp_path / name) for name in ("pieces", "once"))
    a, b = (stored(run.path) for run in (one, other))
    assert torch.equal(a.rows, b.rows)
    assert torch.equal(a.gdot, b.gdot)
    for file in sorted(one.path.glob("curvature-*")):
        assert file.read_bytes() == (other.path / file.name).read_bytes()


class Careless(nn.Module):
    """Adds to its hidden layer's input in place, after it was used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)
        self.kept = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.first(x).tanh()
        self.kept = hidden
        out: Tensor = self.second(hidden)
        return out


def test_a_change_in_place_is_found_before_it_is_projected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contributions, "PIECE", 1 << 60)
    model = Careless().double()
    optimizer: torch.optim.Optimizer = adamw(model)
    with (
        pytest.raises(backstory.BackstoryError, match="modified in place"),
        backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **RANDOM) as rec,
    ):
        for t in range(STEPS):
            optimizer.zero_grad()
            with rec.step([3 * t, 3 * t + 1]):
                x = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
                loss: Tensor = model(x)
                loss.square().sum(1).mean().backward()
                if t == KNOWN + 1:
                    model.kept.detach().add_(1.0)
                optimizer.step()
            rec.flush()
    assert backstory.open(tmp_path / "run").n_steps == KNOWN + 1
