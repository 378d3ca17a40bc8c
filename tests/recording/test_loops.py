"""Loops as people write them: recorded as one backward pass for each sample gives it, said in every result, or refused with a way that works."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.adam import adamw
from tests.support.loops import (
    FULL,
    Interrupted,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    normal,
    one_backward_each,
    one_step,
    seeded,
    sgd,
    snapshot,
    stored,
    trained_names,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import backstory
from backstory.errors import CoverageError, StoreError, UnsupportedError, UsageError

STEPS = 4
Change = Callable[[nn.Module], object]


def data() -> TensorDataset:
    x, y = batch_of(list(range(8)))
    return TensorDataset(x, y)


@pytest.mark.parametrize("mixed", ["no", "bf16"])
def test_accelerates_loop(mixed: str, tmp_path: Path) -> None:
    """Its wrapper of the optimizer and its own backward; with bfloat16 its wrapper of forward."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=mixed)
    net = mlp() if mixed == "no" else mlp().float()
    loader = DataLoader(backstory.with_ids(data()), batch_size=4)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader)
    expected = []
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for ids, x, y in loader:
            x = x.float() if mixed == "bf16" else x
            expected.append(one_backward_each(model, (x, y), cross_entropy, trained_names(model)))
            with rec.step(ids):
                accelerator.backward(F.cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            optimizer.zero_grad()
    actual = stored(tmp_path / "run")
    assert_close(actual.rows, torch.cat(expected).double(), 1e-10 if mixed == "no" else 2e-2)
    assert backstory.open(tmp_path / "run")._store.config["optimizer"]["class"] == "AdamW"


def test_accelerates_accumulation_inside_one_step(tmp_path: Path) -> None:
    """Its optimizer steps at the last micro-batch alone; one `rec.step()` is around all of them."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    net = mlp()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    expected = []
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(2):
            with rec.step() as s:
                for ids in (ids_of(2 * t), ids_of(2 * t + 1)):
                    s.batch(ids)
                    expected.append(one_backward_each(model, batch_of(ids), cross_entropy, trained_names(model)))
                    with accelerator.accumulate(model):
                        accelerator.backward(cross_entropy(model, batch_of(ids)).mean())
                        optimizer.step()
                        optimizer.zero_grad()
    assert_close(stored(tmp_path / "run").rows, torch.cat(expected), 1e-10)


class Block(nn.Module):
    """Its inside is computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.inner, self.reentrant = nn.Linear(3, 4), nn.Linear(4, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.inner, self.first(x).tanh(), use_reentrant=self.reentrant)
        return out


@pytest.mark.parametrize("curvature", ["auto", "empirical"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant: bool, curvature: str, tmp_path: Path) -> None:
    model = seeded(Block(reentrant))
    optimizer, expected = adamw(model), []
    with backstory.record(
        model, optimizer, tmp_path / "run", loss_reduction="mean", curvature=curvature, **FULL
    ) as rec:
        for t in range(STEPS):
            if reentrant and curvature == "auto" and t == 1:
                break  # exact curvature needs another pass, which the reentrant kind does not have: the first step is recorded
            plain = seeded(Block(False))
            plain.load_state_dict(model.state_dict())
            expected.append(one_backward_each(plain, batch_of(ids_of(t)), cross_entropy, trained_names(model)))
            one_step(rec, model, optimizer, ids_of(t))
    assert_close(stored(tmp_path / "run").rows, torch.cat(expected), 1e-10)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
def test_a_compiled_model_over_several_steps(tmp_path: Path) -> None:
    torch.compiler.reset()
    model, plain = mlp(), mlp()
    optimizer = sgd(model, momentum=0.5)
    expected = []
    compiled = torch.compile(model, backend="aot_eager")
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(STEPS):
            plain.load_state_dict(model.state_dict())
            expected.append(one_backward_each(plain, batch_of(ids_of(t)), cross_entropy, trained_names(model)))
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                x, y = batch_of(ids_of(t))
                F.cross_entropy(compiled(x), y).backward()
                optimizer.step()
    assert_close(stored(tmp_path / "run").rows, torch.cat(expected), 1e-10)
    torch.compiler.reset()


def test_a_grad_scaler_over_several_steps(tmp_path: Path) -> None:
    model = mlp().float()
    optimizer = sgd(model)
    scaler, expected = torch.amp.GradScaler("cpu", init_scale=2.0**8), []
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", scaler=scaler, **FULL) as rec:
        for t in range(STEPS):
            x, y = (v.float() if v.is_floating_point() else v for v in batch_of(ids_of(t)))
            expected.append(one_backward_each(model, (x, y), cross_entropy, trained_names(model)))
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                scaler.scale(F.cross_entropy(model(x), y)).backward()
                scaler.step(optimizer)
            scaler.update()
    assert_close(stored(tmp_path / "run").rows, torch.cat(expected).double(), 1e-4)
    assert not backstory.open(tmp_path / "run").caveats()


def two(path: Path, other: Callable[[nn.Module], list[nn.Parameter]]) -> backstory.Run:
    """A loop with two optimizers, of which the first is recorded."""
    model = mlp()
    first, *_ = model.children()
    recorded = sgd(first)
    beside = torch.optim.AdamW(other(model), lr=0.05)
    with backstory.record(model, recorded, path, loss_reduction="mean", **FULL) as rec:
        for t in range(STEPS):
            model.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, batch_of(ids_of(t))).mean().backward()
                recorded.step()
                beside.step()
    return backstory.open(path)


def test_parameters_of_another_optimizer_are_taken_as_frozen_and_results_say_so(tmp_path: Path) -> None:
    run = two(tmp_path / "run", lambda model: list(model[2].parameters()))  # type: ignore[index]
    (words,) = run.caveats()
    assert "2 parameters are in no optimizer group and are treated as frozen" in words


def test_a_model_that_a_second_optimizer_updates_too_is_noticed(tmp_path: Path) -> None:
    run = two(tmp_path / "run", lambda model: list(model[0].parameters()))  # type: ignore[index]
    assert any(f"changed {STEPS - 1} times" in c and "another optimizer" in c for c in run.caveats())


def test_a_list_of_optimizers_is_refused(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(UsageError, match=r"one optimizer.*takes what others train as frozen.*parameter groups"):
        backstory.record(model, [sgd(model), sgd(model)], tmp_path, loss_reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"must be a torch\.optim\.Optimizer, got dict"):
        backstory.record(model, {}, tmp_path, loss_reduction="mean")  # type: ignore[arg-type]


def alternating(path: Path) -> backstory.Run:
    """A GAN's loop, of which the discriminator is recorded: the other model's steps are none of its own."""
    d, g = seeded(nn.Sequential(nn.Linear(3, 1))), seeded(nn.Linear(2, 3))
    of_d, of_g = sgd(d), torch.optim.Adam(g.parameters(), lr=0.01)
    with backstory.record(d, of_d, path, loss_reduction="weights", **FULL) as rec:
        for t in range(STEPS):
            real, fake = normal(3, 3, seed=t), g(normal(3, 2, seed=100 + t))
            of_d.zero_grad()
            with rec.step() as s:
                s.batch([f"real {3 * t + i}" for i in range(3)], weights=[1 / 3] * 3)
                loss = F.softplus(-d(real)).mean()
                s.batch([f"fake {3 * t + i}" for i in range(3)], weights=[1 / 3] * 3)
                (loss + F.softplus(d(fake.detach())).mean()).backward()
                of_d.step()
            of_g.zero_grad()
            F.softplus(-d(fake)).mean().backward()
            of_g.step()
    return backstory.open(path)


def test_alternating_models(tmp_path: Path) -> None:
    run = alternating(tmp_path / "run")
    assert run.n_steps == STEPS
    assert not run.caveats()


def added(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)


def through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(1.01)


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        p.data = 0.9 * p.data


def there_and_back(model: nn.Module) -> None:
    kept = {k: v.clone() for k, v in model.state_dict().items()}
    added(model)
    model.load_state_dict(kept)


CHANGES: dict[str, tuple[Change, int]] = {
    "in place": (added, 2),
    "through .data": (through_data, 2),
    "replaced": (replaced, 2),
    "loaded": (lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}), 2),
    "exchanged for an evaluation": (there_and_back, 0),
    "evaluated": (lambda m: m.eval()(normal(2, 3)), 0),
}


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
@pytest.mark.parametrize("name", CHANGES)
def test_weights_changed_by_hand_are_counted_and_said(name: str, kind: str, tmp_path: Path) -> None:
    change, count = CHANGES[name]
    model = mlp()
    optimizer = sgd(model) if kind == "sgd" else adamw(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(5):
            if t in (2, 3):
                change(model)
            one_step(rec, model, optimizer, ids_of(t))
    said = [c for c in backstory.open(tmp_path / "run").caveats() if "were changed" in c]
    assert len(said) == bool(count)
    assert not said or f"weights were changed {count} times between two updates" in said[0]


def test_a_layer_unfrozen_in_the_middle_is_refused_and_the_way_out_works(tmp_path: Path) -> None:
    model = mlp()
    model[0].requires_grad_(False)  # type: ignore[index]
    optimizer = sgd(model)
    with pytest.raises(
        CoverageError, match=r"were frozen when recording began. End this recording and start a new run"
    ):
        with backstory.record(model, optimizer, tmp_path / "first", loss_reduction="mean", **FULL) as rec:
            for t in range(STEPS):
                if t == 2:
                    model[0].requires_grad_(True)  # type: ignore[index]
                one_step(rec, model, optimizer, ids_of(t))
    assert backstory.open(tmp_path / "first").n_steps == 2
    with backstory.record(model, optimizer, tmp_path / "second", loss_reduction="mean", **FULL) as rec:
        one_step(rec, model, optimizer, ids_of(2))
    assert backstory.open(tmp_path / "second").n_steps == 1


def test_a_layer_frozen_in_the_middle_is_refused_where_its_momentum_would_stand_still(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, momentum=0.9)
    with pytest.raises(UnsupportedError, match=r"got no gradient in this step.*Freeze them before recording"):
        with backstory.record(model, optimizer, tmp_path, loss_reduction="mean", **FULL) as rec:
            one_step(rec, model, optimizer, ids_of(0))
            model[0].requires_grad_(False)  # type: ignore[index]
            one_step(rec, model, optimizer, ids_of(1))


@pytest.mark.parametrize("error", [Interrupted, KeyboardInterrupt])
@pytest.mark.parametrize("inside", [True, False])
def test_a_run_that_ends_in_its_warm_up_can_be_ended_there_and_queried(
    error: type[BaseException], inside: bool, tmp_path: Path
) -> None:
    model = mlp()
    names: dict[str, Any] = {"loss_reduction": "mean", "rank": 2, "curvature": "empirical"}
    optimizer = sgd(model)
    with pytest.raises(error), backstory.record(model, optimizer, tmp_path / "run", **names) as rec:
        for t in range(3):
            one_step(rec, model, optimizer, ids_of(t))
        kept = snapshot(model, optimizer)
        if inside:
            with rec.step(ids_of(3)):
                raise error
        raise error
    model.load_state_dict(kept["model"])
    with pytest.raises(StoreError, match="resume=True, start=3, also to end it there"):
        backstory.open(tmp_path / "run").query(model, cross_entropy, batch_of([0]))
    with backstory.record(model, optimizer, tmp_path / "run", resume=True, start=3, **names):
        pass
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 3
    assert bool(run.query(model, cross_entropy, batch_of([0])).scores.any())


def test_what_was_committed_before_ctrl_c_can_be_queried(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with (
            pytest.raises(KeyboardInterrupt),
            backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", rank=2, warmup_steps=2) as rec,
        ):
            for t in range(5):
                one_step(rec, model, optimizer, ids_of(t))
            raise KeyboardInterrupt
    assert backstory.open(tmp_path / "run").query(model, cross_entropy, batch_of([0])).scores.shape == (1, 15)
