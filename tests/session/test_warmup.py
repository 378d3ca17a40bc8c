"""Learned subspaces: the basis is the one of the first steps' gradients, and no step is lost to it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.oracles import assert_close
from tests.session.loops import (
    Interrupted,
    batch_of,
    cross_entropy,
    curved,
    ids_of,
    mlp,
    one_backward_each,
    sgd,
    stored,
    train,
    trained_names,
)
from tests.session.zoo import ZOO
from torch import Tensor, nn

import backstory
from backstory.errors import StoreError
from backstory.session.warmup import spooled_bytes, warmup_of
from backstory.store import RunStore

LEARNED: dict[str, Any] = {"subspace": "learned", "rank": (3, 2), "encoding": "float64", "warmup_steps": 3}


def by_parameter(rows: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Full rows cut into gradients (N, d_out, d_in) of each parameter."""
    sizes = [model.get_parameter(n).numel() for n in trained_names(model)]
    parts = rows.split(sizes, 1)
    shapes = [model.get_parameter(n).shape for n in trained_names(model)]
    return {n: x.reshape(len(x), s[0], -1) for n, x, s in zip(trained_names(model), parts, shapes, strict=True)}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize(
    "name", ["positions (S,)", "tied weights", "a module called several times", "conv2d, all unequal", "linear"]
)
def test_rows_are_true_rows_in_the_basis_of_the_warm_up(name: str, micro: int, tmp_path: Path) -> None:
    model = ZOO[name].make()
    optimizer = sgd(model, 0.01)
    full, w = [], torch.linspace(0.1, 0.7, 4, dtype=torch.float64)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="weights", **LEARNED) as rec:
        for t in range(5):
            batch = ZOO[name].batch(t, 4)
            full.append(one_backward_each(model, batch, curved, trained_names(model)))
            optimizer.zero_grad()
            with rec.step() as s:
                for part in torch.arange(4).chunk(micro):
                    s.batch([f"{t}-{i}" for i in part.tolist()], weights=w[part])
                    (w[part] * curved(model, tuple(x[part] for x in batch))).sum().backward()
                optimizer.step()
    basis = RunStore.open(tmp_path / "run").load_tensors("basis")
    warm, everything = (by_parameter(torch.cat(x), model) for x in (full[:3], full))
    expected = []
    for n, G in everything.items():
        vector = model.get_parameter(n).dim() == 1
        left = _side(basis.get(f"{n}/left"), torch.einsum("bij,bkj->ik", warm[n], warm[n]), 12 if vector else 3)
        right = _side(basis.get(f"{n}/right"), torch.einsum("bij,bik->jk", warm[n], warm[n]), 1 if vector else 2)
        expected.append(torch.einsum("bij,ir,jk->brk", G, left, right).flatten(1))
    assert_close(
        stored(tmp_path / "run").rows, torch.cat(expected, 1), 1e-10, "Were calls squared before they were added?"
    )


def _side(found: Tensor | None, moment: Tensor, r: int) -> Tensor:
    """The stored side, checked: orthonormal, and as good as the top eigenvectors of the true moment."""
    if r >= len(moment):
        assert found is None
        return torch.eye(len(moment), dtype=torch.float64)
    assert found is not None
    torch.testing.assert_close(found.T @ found, torch.eye(r, dtype=torch.float64), rtol=0, atol=1e-12)
    best = torch.linalg.eigvalsh(moment)[-r:].sum()
    assert float((found.T @ moment @ found).trace() / best) == pytest.approx(1, abs=1e-12)
    return found


def test_a_run_shorter_than_its_warm_up_is_complete(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2, **LEARNED)
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 2
    assert run.store.spooled() == []
    assert warmup_of(run.store) == 2
    assert len(run.query(model, cross_entropy, batch_of([0]))) == 6


def test_a_byte_budget_ends_the_warm_up_early(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model, sgd(model), 4, stop=2, **{**LEARNED, "warmup_steps": 99})
    store = RunStore.open(tmp_path / "run")
    assert store.spooled() == [0, 1]
    two = spooled_bytes(store)
    model = mlp()
    train(tmp_path / "budget", model, sgd(model), 6, **{**LEARNED, "warmup_steps": 99, "warmup_bytes": two})
    assert warmup_of(RunStore.open(tmp_path / "budget")) == 2


def test_an_interrupted_warm_up_waits_and_says_so(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model, sgd(model), 4, stop=2, **LEARNED)
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 0
    assert run.store.verify() == []
    with pytest.raises(
        StoreError, match=r"no complete step yet: 2 warm-up steps wait for their basis.*resume=True, start=2"
    ):
        run.query(model, cross_entropy, batch_of([0]))
    optimizer = sgd(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", resume=True, start=2, **LEARNED):
        pass  # a clean end is enough
    assert len(backstory.open(tmp_path / "run").query(model, cross_entropy, batch_of([0]))) == 6


def test_ids_and_losses_survive_the_spool(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model)
    expected = []
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="mean", **LEARNED) as rec:
        for t in range(2):
            optimizer.zero_grad()
            with rec.step([f"ü{i}" for i in ids_of(t)]) as s:
                losses = cross_entropy(model, batch_of(ids_of(t)))
                if t:
                    s.losses(losses)
                    expected = losses.tolist()
                losses.mean().backward()
                optimizer.step()
    found = stored(tmp_path / "run")
    assert found.samples == [f"ü{i}" for t in range(2) for i in ids_of(t)]
    assert found.loss[3:].tolist() == expected
    assert bool(found.loss[:3].isnan().all())
