"""Small training loops, and the slow truth about their rows: one backward pass for each sample, on a copy without hooks.

The truth shares no code with `backstory`; only `train` and `stored` call it.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.oracles import assert_same
from torch import Tensor, nn

import backstory
from backstory.results.recording_report import RecordingReport
from backstory.store import RunStore, StepTable

Batch = tuple[Tensor, ...]
Losses = Callable[[nn.Module, Batch], Tensor]  # (model, batch) -> ℓ of each sample (B,)
FULL: dict[str, Any] = {"projection": "full", "encoding": "float64"}


class Interrupted(Exception):
    """What a test raises inside a training loop."""


class Stored(NamedTuple):
    """All that a run holds of its steps."""

    rows: Tensor  # (N, Σp) float64
    weight: Tensor
    loss: Tensor
    gdot: Tensor
    samples: list[str]
    step: Tensor
    table: StepTable


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def seeded(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` in float64 with parameters that depend on `seed` alone, none of them 0 or 1."""
    model = model.double()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(0.5 * torch.randn(p.shape, generator=generator(1000 * seed + i), dtype=torch.float64))
    return model


def mlp(seed: int = 0, width: int = 4) -> nn.Module:
    """3 -> width -> 2."""
    return seeded(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2)), seed)


def ids_of(t: int, n: int = 3, of: int = 9) -> list[int]:
    """The samples of step t: every sample comes again and again, in another company."""
    order = torch.randperm(of, generator=generator(77 + t * n // of)).tolist()
    return [order[(t * n + i) % of] for i in range(n)]


def batch_of(ids: Sequence[int]) -> Batch:
    """Inputs (B, 3) and classes (B,) of the samples, the same whenever they are asked for."""
    x = torch.stack([normal(3, seed=500 + i) for i in ids])
    return x, torch.tensor([i % 2 for i in ids])


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def curved(model: nn.Module, batch: Batch) -> Tensor:
    """A loss of any output: Σ (c ∘ out)², so that δ differs between samples and positions."""
    out = model(*batch)
    c = normal(*out.shape[1:], seed=9) if out.dim() > 1 else torch.ones((), dtype=out.dtype)
    losses: Tensor = (c * out).square().flatten(1).sum(1)
    return losses


def trained_names(model: nn.Module) -> list[str]:
    return [n for n, p in model.named_parameters() if p.requires_grad]


def one_backward_each(model: nn.Module, batch: Batch, losses: Losses, names: Sequence[str]) -> Tensor:
    """Rows (B, Σ numel) of ∇ℓ by one forward and one backward pass of each sample alone."""
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    rows = []
    for i in range(len(batch[0])):
        twin.zero_grad()
        losses(twin, tuple(x[i : i + 1] for x in batch)).sum().backward()
        grads = [parameters[n].grad for n in names]
        rows.append(torch.cat([torch.zeros(parameters[n].numel()).double() if g is None else g.flatten()
                               for n, g in zip(names, grads, strict=True)]))  # fmt: skip
    return torch.stack(rows)


def stored(path: Path) -> Stored:
    store = RunStore.open(path)
    block = store.read(0, store.n_rows(), samples=True, dtype=torch.float64)
    assert block.rows is not None
    assert block.samples is not None
    return Stored(block.rows, block.weight, block.loss, block.gdot, block.samples, block.step, store.steps())


def terms_of(model: nn.Module, steps: int, batch: int = 3) -> int:
    """The length of the sums behind one number of a training run, as `assert_same` takes it.

    Of each step the inner dimensions of every layer's products: forward, back, and over the batch (samples × positions);
    and the whole gradient, over which its norm and ⟨g, ∇L⟩ are sums.
    """
    each = [p.numel() + len(p) + p[0].numel() + batch for p in model.parameters()]
    return steps * sum(each)


def same_numbers(a: Stored, b: Stored, terms: int, dtype: torch.dtype = torch.float64) -> None:
    """Two recordings of one training: the same steps and samples, and numbers that are as near as rounding allows."""
    assert a.samples == b.samples
    assert torch.equal(a.step, b.step)
    assert torch.equal(a.weight, b.weight), "a weight is 1/n, not a sum"
    assert torch.equal(a.loss.isnan(), b.loss.isnan())
    for name in ("rows", "gdot", "loss"):
        assert_same(getattr(a, name).nan_to_num(0), getattr(b, name).nan_to_num(0), terms, dtype=dtype)
    for name in ("step", "row_start", "rows"):
        np.testing.assert_array_equal(getattr(a.table, name), getattr(b.table, name), name)
    for name in ("clip", "norm", "coverage", "size", "trained"):
        assert_same(
            torch.from_numpy(getattr(a.table, name)), torch.from_numpy(getattr(b.table, name)), terms, dtype=dtype
        )
    np.testing.assert_allclose(a.table.drift, b.table.drift, rtol=0, atol=1e-6)  # of log P, in float32: 16 × 6e-8
    for name, values in a.table.groups.items():
        np.testing.assert_array_equal(values, b.table.groups[name], name)


def same_report(first: RecordingReport | None, second: RecordingReport | None) -> None:
    """Two reports on a recording, each from a sweep of its own: numbers up to the rounding of float32."""
    assert first is not None
    assert second is not None
    a, b = first.measured(), second.measured()
    for key, value in b.items():
        assert a[key] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), key


def same_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor], terms: int) -> None:
    """Two models after one training, in its own precision."""
    assert a.keys() == b.keys()
    for name in a:
        assert_same(a[name], b[name], terms)


def train(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    start: int = 0,
    stop: int | None = None,
    error: type[BaseException] = Interrupted,
    max_norm: float | None = None,
    schedule: Any = None,
    losses: Losses = cross_entropy,
    batch: Callable[[Sequence[int]], Batch] = batch_of,
    size: int = 3,
    seen: Callable[[int, Sequence[int]], None] | None = None,
    planned: int | None = None,
    **settings: Any,
) -> None:
    """A recorded loop over `steps` steps with a mean loss; raises `error` in the middle of step `stop`."""
    settings = {"loss_reduction": "mean", "steps": planned, **FULL, **settings}
    if start or settings.get("resume"):
        settings = {"resume": True, "start": start, **settings}
    with backstory.record(model, optimizer, path, **settings) as rec:
        for t in range(start, steps):
            ids = ids_of(t, size)
            if seen is not None:
                seen(t, ids)
            optimizer.zero_grad()
            with rec.step(ids):
                losses(model, batch(ids)).mean().backward()
                if t == stop:
                    raise error
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
            if schedule is not None:
                schedule.step()


def one_step(
    rec: backstory.Recorder,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: Sequence[int],
    *,
    names: Sequence[int | str] | None = None,
    factor: Tensor | float = 1.0,
    updates: int = 1,
    error: type[BaseException] | None = None,
) -> None:
    """Zero, forward, backward, and `updates` updates inside one recorded step; then `error`, if any."""
    optimizer.zero_grad()
    with rec.step(ids if names is None else names):
        (factor * cross_entropy(model, batch_of(ids))).mean().backward()
        for _ in range(updates):
            optimizer.step()
        if error is not None:
            raise error


def sgd(model: nn.Module, lr: float = 0.1, **settings: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **settings)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a user's own checkpoint holds."""
    return copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


def restore(state: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
