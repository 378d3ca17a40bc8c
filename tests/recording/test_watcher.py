"""Steps from their hooks to their records: what is read of them, and what goes wrong behind the training."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import (
    FULL,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    one_backward_each,
    seeded,
    sgd,
    terms_of,
    train,
)
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import NumericalError, UsageError
from backstory.store import RunStore


def test_a_row_that_is_not_finite_is_named_in_its_own_step(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **FULL) as rec:
        for t in range(3):
            optimizer.zero_grad()
            ids = ids_of(t)

            def take(t: int = t, ids: list[int] = ids) -> None:
                with rec.step(ids):
                    x, y = batch_of(ids)
                    x[1] = torch.nan if t == 2 else x[1]
                    cross_entropy(model, (x, y)).mean().backward()
                    optimizer.step()

            if t < 2:
                take()
                continue
            with pytest.raises(NumericalError, match=f"sample '{ids[1]}' in step 2"):
                take()
    assert RunStore.open(tmp_path / "run").n_steps() == 2


def test_clipping_follows_all_that_was_clipped_and_coverage_what_is_trained(tmp_path: Path) -> None:
    """`clip_grad_norm_(model.parameters())` takes the norm over a backbone too that the optimizer does not have."""
    model, names = mlp(), ["2.weight", "2.bias"]
    head = [model.get_parameter(n) for n in names]
    whole = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, ["0.weight", "0.bias", *names]).mean(0)
    G = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, names)  # (B, p)
    train(tmp_path / "run", model, torch.optim.SGD(head, lr=0.1), 1, max_norm=0.05)
    run, n, norm = backstory.open(tmp_path / "run"), G.mean(0), float(whole.norm())
    c, rho = 0.05 / (norm + 1e-6), norm / (norm + 1e-6)
    J = c * (torch.eye(len(n)) - rho * torch.outer(n, n) / norm**2)
    v = torch.arange(1.0, len(n) + 1).double()
    actual = run.query_gradients(v[None]).scores
    ratio = 0.1 / 3 * (G @ (J @ v)) / actual[0]
    assert_close(actual, 0.1 / 3 * (G @ (J @ v))[None], 1e-9, f"the ratios are {ratio.tolist()}")
    table = run.steps()
    assert table.clip.tolist() == pytest.approx([c], rel=1e-9)
    assert table.norm.tolist() == pytest.approx([norm], rel=1e-9)
    assert table.coverage.tolist() == pytest.approx([float(n.square().sum()) / norm**2], rel=1e-9)
    assert table.trained.tolist() == [1.0]


@pytest.mark.parametrize("projection", ["random", "learned"])
def test_both_shares_are_kept_in_adams_coordinates_and_through_a_warm_up(projection: str, tmp_path: Path) -> None:
    model, names = mlp(), ["2.weight", "2.bias"]
    whole = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, ["0.weight", "0.bias", *names]).mean(0)
    part = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, names).mean(0)
    optimizer = torch.optim.AdamW([model.get_parameter(n) for n in names], lr=0.1)
    train(tmp_path / "run", model, optimizer, 1, max_norm=0.05, projection=projection, rank=2)
    table = RunStore.open(tmp_path / "run").steps()
    assert table.coverage.tolist() == pytest.approx([float(part.square().sum() / whole.square().sum())], rel=1e-9)
    assert table.trained.tolist() == [1.0]


class Keeping(nn.Module):
    """A net that lets the loop reach into what lies between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.between = nn.Linear(3, 4), nn.Linear(4, 2), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.between = self.one(x).tanh()
        out: Tensor = self.two(self.between)
        return out


def adamw_run(path: Path, spoil: Callable[[int, Tensor, Keeping], object], steps: int = 4) -> RunStore:
    """`spoil(t, x, model)` is called at the end of each step, inside it."""
    model = seeded(Keeping())
    assert isinstance(model, Keeping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"loss_reduction": "mean", "projection": "random", "rank": 2, "encoding": "float64"}
    with backstory.record(model, optimizer, path, **settings, steps=steps, checkpoints=1) as rec:
        x, y = batch_of(ids_of(0))
        for t in range(steps):
            x.copy_(batch_of(ids_of(t))[0])
            optimizer.zero_grad()
            with rec.step(ids_of(t)):
                cross_entropy(model, (x, y)).mean().backward()
                optimizer.step()
                spoil(t, x, model)
    return RunStore.open(path)


def rows_of(store: RunStore) -> Tensor:
    actual = store.read(0, store.n_rows(), dtype=torch.float64).rows
    assert actual is not None
    return actual


def test_a_buffer_that_batches_share_is_read_in_time(tmp_path: Path) -> None:
    shared = adamw_run(tmp_path / "shared", lambda t, x, model: x.numpy().fill(7.0))  # no version counts this
    alone = adamw_run(tmp_path / "alone", lambda t, x, model: None)
    assert_same(rows_of(shared), rows_of(alone), terms_of(Keeping(), 4))


def test_an_activation_that_is_changed_is_refused_and_the_run_ends_before_it(tmp_path: Path) -> None:
    """Nor is there a checkpoint of a step that is not recorded."""

    def spoil(t: int, x: Tensor, model: Keeping) -> None:
        if t == 1:
            with torch.no_grad():
                model.between.zero_()

    with pytest.raises(UsageError, match=r"layer of 'two\.weight' was modified in place .* new tensors"):
        adamw_run(tmp_path / "run", spoil)
    store = RunStore.open(tmp_path / "run")
    assert store.n_steps() == 1
    assert [n for n in store.tensor_names() if n.startswith("checkpoint")] == ["checkpoint-00000000"]


def test_after_a_failure_behind_the_training_the_run_says_where_it_ends(tmp_path: Path) -> None:
    model = seeded(Keeping())
    assert isinstance(model, Keeping)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    settings: dict[str, Any] = {"loss_reduction": "mean", "projection": "random", "rank": 2}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        with rec.step(ids_of(0)):
            cross_entropy(model, batch_of(ids_of(0))).mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.between.zero_()
        with pytest.raises(UsageError, match="modified in place"):
            rec.flush()
        with pytest.raises(UsageError, match="which ends at step 0"):
            rec.step(ids_of(1)).__enter__()
