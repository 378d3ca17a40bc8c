"""Four small runs give the numbers that were written down, to 1e-6 of the largest: `sgd` and `checkpoints` before the package was rearranged,
`gpt` and `clipped` when windows became 40 steps long and Adam's second moment known before a step (else they were the same).

    UPDATE_NUMBERS=1 python -m pytest tests/test_numbers.py      writes them down anew, in tests/golden

Float64 throughout, so that another processor's rounding is far below the bound.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import backstory
from backstory import insight
from backstory.recording.from_checkpoints import record_checkpoints

GOLDEN = Path(__file__).parent / "golden"
N, STEPS, BATCH = 24, 30, 4
WORDS, LENGTH = 13, 6


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(model: nn.Module) -> nn.Module:
    model = model.double()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(0.4 * normal(*p.shape, seed=100 + i))
    return model


class Attention(nn.Module):
    """One block of a GPT without LayerNorm's tricks: enough for Adam's coordinates, positions and embeddings."""

    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, d), nn.Parameter(torch.zeros(LENGTH, d), requires_grad=False)
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.words(tokens) + self.places
        a = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h), is_causal=True)
        out: Tensor = self.head(self.norm(h + self.o(a)))
        return out


def classes(ids: Any) -> tuple[Tensor, Tensor]:
    return torch.stack([normal(5, seed=500 + int(i)) for i in ids]), torch.tensor([int(i) % 3 for i in ids])


def texts(ids: Any) -> tuple[Tensor, ...]:
    drawn = [torch.randint(0, WORDS, (LENGTH + 1,), generator=torch.Generator().manual_seed(900 + int(i))) for i in ids]
    return torch.stack(drawn)[:, :-1], torch.stack(drawn)[:, 1:]


def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    out = model(batch[0])
    each = F.cross_entropy(out.flatten(0, -2), batch[1].flatten(), reduction="none")
    return each.view(len(out), -1).mean(1)


def batches() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(4)
    shuffled: tuple[Tensor, ...] = torch.cat([torch.randperm(N, generator=g) for _ in range(5)]).split(BATCH)
    return shuffled


def classifier() -> nn.Module:
    return seeded(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.5, weight_decay=0.01)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)


def recorded(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Callable[[Any], Any],
    clip: float | None,
    **settings: Any,
) -> backstory.Run:
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.2, STEPS)
    with backstory.record(
        model, optimizer, path, loss_reduction="mean", encoding="float64", steps=STEPS, checkpoints=2, **settings
    ) as rec:
        rec.describe(list(range(N)), source=["even" if i % 2 == 0 else "odd" for i in range(N)])
        for ids in batches():
            optimizer.zero_grad()
            with rec.step([int(i) for i in ids]):
                loss(model, data(ids)).mean().backward()
                if clip is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
            schedule.step()
    return backstory.open(path)


def from_checkpoints(path: Path, model: nn.Module) -> backstory.Run:
    """Weights of every tenth step of a training nobody recorded."""
    optimizer, kept = sgd(model), []
    for t, ids in enumerate(batches()):
        if t % 10 == 0:
            kept.append((t, {k: v.clone() for k, v in model.state_dict().items()}, None))
        optimizer.zero_grad()
        loss(model, classes(ids)).mean().backward()
        optimizer.step()
    kept.append((STEPS, {k: v.clone() for k, v in model.state_dict().items()}, None))
    plan = backstory.Recipe(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), loss=loss, loss_reduction="mean",
        batches=[([int(i) for i in ids], classes(ids)) for ids in batches()],
    )  # fmt: skip
    return record_checkpoints(plan, kept, path, encoding="float64", projection="full")


RUNS: dict[str, Callable[[Path, nn.Module], backstory.Run]] = {
    "sgd": lambda path, model: recorded(path, model, sgd(model), classes, None, projection="full"),
    "gpt": lambda path, model: recorded(path, model, adamw(model), texts, None, projection="learned", rank=3),
    "clipped": lambda path, model: recorded(
        path, model, adamw(model), classes, 0.5, projection="learned", rank=3, curvature="empirical/1"
    ),
    "checkpoints": from_checkpoints,
}


def numbers(run: backstory.Run, model: nn.Module, data: Callable[[Any], Any]) -> dict[str, Any]:
    """Scores, embeddings, the timeline, sources, harmful and helpful samples, what overwrote a sample, and its evolution."""
    queries = data(range(N, N + 5))
    answer = run.query(model, loss, queries)
    run.embed(dtype=torch.float64, encoding="float64")
    when = insight.timeline(run, model, loss, queries)
    out = {
        "scores": answer.scores, "embeddings": run.embeddings(), "embedded": run.query(model, loss, queries, method="embeddings").scores,
        "timeline": when.influence, "size": when.size,
    }  # fmt: skip
    ends = insight.harmful(run, model, loss, queries, top=6)
    for name, some in (("harmful", ends.harmful), ("helpful", ends.helpful)):
        out[name], out[f"{name} ids"] = [x.influence for x in some], [int(x.sample) for x in some]
    lost = insight.overwriting(run, model, loss, queries, 3)
    out["overwriting"] = [lost.just_after, lost.influence, lost.overwritten, lost.momentum, lost.decay]
    if run._store.samples().num_rows:
        values = insight.sources(run, model, loss, {"all": queries}).total
        out["sources"] = [[v.value, v.low, v.high] for v in values]
    if len(run.checkpoints) > 1:
        out["evolution"] = insight.evolution(run, model, loss, queries).mean
    return {k: np.asarray(v, dtype=np.float64) for k, v in out.items()}


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_the_same(name: str, tmp_path: Path) -> None:
    model = seeded(Attention()) if name == "gpt" else classifier()
    actual = numbers(RUNS[name](tmp_path / "run", model), model, texts if name == "gpt" else classes)
    file = GOLDEN / f"{name}.npz"
    if os.environ.get("UPDATE_NUMBERS"):
        np.savez_compressed(file, **actual)
    expected = np.load(file)
    assert sorted(expected) == sorted(actual)
    for what in expected:
        size = np.nanmax(np.abs(expected[what]))
        np.testing.assert_allclose(actual[what], expected[what], rtol=0, atol=1e-6 * size, err_msg=what)
