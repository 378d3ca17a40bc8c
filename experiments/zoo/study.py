r"""Each family recorded as it is, and its rows beside one backward pass for each sample.

The truth for a step is the whole batch's forward pass, with the step's own random numbers, and ∇ℓ_z for each sample z. Where samples mix
(BatchNorm), it is ∂L/∂W⁽ᶻ⁾ with a copy W⁽ᶻ⁾ of the weights for each sample (`copies`).
"""

import copy
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import backstory
from backstory.errors import BackstoryError
from backstory.store import RunStore
from experiments.zoo.copies import own_copies
from experiments.zoo.families import SAMPLES, Family, families, generator

STEPS, TIMED, WARM = 3, 6, 4
Say = Callable[[str, int, int], None]


def study(names: Sequence[str] | None = None, say: Say = lambda stage, done, total: None) -> dict[str, Any]:
    """All families, or those that are named."""
    chosen = {n: f for n, f in families().items() if names is None or n in names}
    rows = []
    for k, (name, family) in enumerate(chosen.items()):
        rows.append({"name": name, **one(family)})
        say(name, k + 1, len(chosen))
    return {"families": rows}


def one(family: Family) -> dict[str, Any]:
    """What became of one family."""
    remedy: dict[str, Any] = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            found = {"result": "recorded", **_recorded(family, Path(folder), {}), "remedy_works": None, "reason": None}
        except BackstoryError as error:
            found, remedy = _refused(family, Path(folder), str(error)), dict(family.remedy)
        return found | {"overhead": _overhead(family, Path(folder), remedy)}


def _refused(family: Family, folder: Path, reason: str) -> dict[str, Any]:
    try:
        again = _recorded(family, folder / "again", dict(family.remedy)) if family.remedy else None
    except BackstoryError:
        again = None
    works = again is not None and again["largest_error"] < 1e-5
    none = {"largest_error": None, "coverage": None}
    return {"result": "refused", **(again or none), "remedy_works": works, "reason": reason}


def _recorded(family: Family, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """A recording at the defaults, and one in all coordinates, whose rows are compared."""
    _train(family, folder / "default", torch.float32, STEPS, settings)
    model = built(family, torch.float64)
    expected: list[Tensor] = []
    names = _train(
        family, folder / "full", torch.float64, STEPS, {**settings, "projection": "full", "encoding": "float64"},
        model=model, before=lambda t: expected.append(truth(family, model, t)),
    )  # fmt: skip
    store = RunStore.open(folder / "full")
    block = store.read(0, store.n_rows(), dtype=torch.float64)
    assert block.rows is not None
    known = {n: p for n, p in model.named_parameters() if p.requires_grad}
    order = [known[n].numel() for n in names]
    sizes = dict(zip(known, np.cumsum([0, *[p.numel() for p in known.values()]]).tolist(), strict=False))
    columns = torch.cat([torch.arange(sizes[n], sizes[n] + k) for n, k in zip(names, order, strict=True)])
    wanted = torch.cat(expected)[:, columns]
    off = (block.rows - wanted).norm(dim=1) / wanted.norm(dim=1).clamp_min(1e-300)
    return {"largest_error": float(off.max()), "coverage": float(store.steps().trained.mean())}


def built(family: Family, dtype: torch.dtype) -> nn.Module:
    """The family's model, none of its parameters 0."""
    torch.manual_seed(0)
    model = family.make().to(dtype).train()
    for i, p in enumerate(model.parameters()):
        p.data += 0.05 * torch.randn(p.shape, generator=generator(i), dtype=torch.float64).to(dtype)
    return model


def inputs_of(family: Family, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The batch of a step."""
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in family.inputs(100 + step).items()}


def seeded(step: int) -> None:
    """The random numbers of a step."""
    torch.manual_seed(step)
    np.random.seed(step)
    random.seed(step)


def losses_of(family: Family, model: nn.Module, step: int, dtype: torch.dtype) -> Tensor:
    """ℓ of each sample, (B,)."""
    inputs = inputs_of(family, step, dtype)
    out: Tensor = family.losses(model(**inputs), inputs)
    return out


def truth(family: Family, model: nn.Module, step: int) -> Tensor:
    """Rows of all parameters in a step, (B, Σ dims), by one backward pass for each sample."""
    twin = copy.deepcopy(model)
    if family.copies:
        seeded(step)
        return own_copies(twin, inputs_of(family, step, torch.float64), family.losses)
    rows, trained = [], [p for p in twin.parameters() if p.requires_grad]
    for z in range(SAMPLES):
        seeded(step)
        grads = torch.autograd.grad(losses_of(family, twin, step, torch.float64)[z], trained, allow_unused=True)
        pairs = zip(grads, trained, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    return torch.stack(rows)


def _train(
    family: Family,
    folder: Path,
    dtype: torch.dtype,
    steps: int,
    settings: dict[str, Any],
    *,
    model: nn.Module | None = None,
    before: Callable[[int], None] = lambda t: None,
) -> list[str]:
    """Train while recording; the names of the recorded parameters."""
    model = built(family, dtype) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with backstory.record(model, optimizer, folder, loss_reduction="mean", **settings) as rec:
        for t in range(steps):
            before(t)
            optimizer.zero_grad()
            seeded(t)
            with rec.step([f"{t}-{z}" for z in range(SAMPLES)]):
                losses_of(family, model, t, dtype).mean().backward()
                optimizer.step()
        return [b.name for b in rec.blocks]


def _overhead(family: Family, folder: Path, settings: dict[str, Any]) -> float | None:
    """CPU time of a recorded step, once the projection is known, over that of a plain one; the medians, by turns."""
    plain, model = built(family, torch.float32), built(family, torch.float32)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (plain, model)]
    times: tuple[list[float], list[float]] = ([], [])

    def step(m: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
        optimizer.zero_grad()
        losses_of(family, m, t, torch.float32).mean().backward()
        optimizer.step()

    try:
        chosen = {"warmup_steps": WARM, "curvature": "empirical", **settings}
        with backstory.record(model, optimizers[1], folder / "timed", loss_reduction="mean", **chosen) as rec:
            for t in range(WARM + TIMED):
                began = time.process_time()
                step(plain, optimizers[0], t)
                middle = time.process_time()
                with rec.step([f"{t}-{z}" for z in range(SAMPLES)]):
                    step(model, optimizers[1], t)
                rec.flush()
                if t >= WARM:
                    times[0].append(middle - began)
                    times[1].append(time.process_time() - middle)
    except BackstoryError:
        return None
    return statistics.median(times[1]) / statistics.median(times[0])
