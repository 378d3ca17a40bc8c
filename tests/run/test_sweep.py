"""From disk to mathematics: whole steps, last first, the same whatever the size of a chunk."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.maths.examples import window_steps
from tests.support.loops import mlp, stored, train
from tests.support.oracles import assert_close
from torch import Tensor

from backstory.maths.adjoint import Adjoint
from backstory.maths.blocked import Propagator
from backstory.maths.steps import Step, expands
from backstory.run import sweep
from backstory.run.sweep import Layers, backward, slices
from backstory.store import RunStore


def recorded(path: Path) -> RunStore:
    model = mlp()
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": rest, "lr": 0.3}, {"params": [first], "weight_decay": 0.1}], lr=0.1)
    train(path, model, optimizer, 7, max_norm=0.1)
    return RunStore.open(path)


@pytest.mark.parametrize("chunk_bytes", [1, 26 * 8 * 7, 1 << 20])
def test_steps_come_whole_and_last_first(chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, actual = recorded(tmp_path / "run"), stored(tmp_path / "run")
    monkeypatch.setattr(sweep, "CHUNK_BYTES", chunk_bytes)
    seen: list[int] = []
    for chunk in backward(store, 6, dtype=torch.float64):
        for i, step in reversed(list(enumerate(chunk.steps))):
            t = chunk.first_step + i
            rows = slice(3 * t, 3 * t + 3)
            assert torch.equal(step.G, actual.rows[rows])
            assert torch.equal(step.w, actual.weight[rows])
            assert step.dot_g is not None
            assert torch.equal(step.dot_g, actual.gdot[rows])
            assert (step.clip, step.norm) == (actual.table.clip[t], actual.table.norm[t])
            seen.append(t)
        assert chunk.row_start == 3 * chunk.first_step
    assert seen == [5, 4, 3, 2, 1, 0]


def test_coefficients_are_numbers_where_groups_agree_and_vectors_where_not(tmp_path: Path) -> None:
    (chunk,) = backward(recorded(tmp_path / "run"), 7, dtype=torch.float64)
    k: Any = chunk.steps[0].coefficients
    assert (k.momentum, k.a, k.n, k.tau, k.decay) == (0.0, 1.0, 0.0, 0.0, 0.0)
    assert isinstance(k.rate, Tensor)
    assert k.rate.tolist() == [0.1] * 12 + [0.3] * 14  # 0.weight is alone in the second group
    assert k.l2.tolist() == [0.1] * 12 + [0.0] * 14


def test_a_block_sees_its_own_coordinates(tmp_path: Path) -> None:
    store = recorded(tmp_path / "run")
    assert slices(store) == [slice(0, 12), slice(12, 16), slice(16, 24), slice(24, 26)]
    (chunk,) = backward(store, 7, dtype=torch.float64)
    _, part = Layers([slice(0, 10), slice(10, 14)]).cut(chunk.steps[0])
    assert torch.equal(part.G, chunk.steps[0].G[:, 10:14])
    assert isinstance(part.coefficients.rate, Tensor)
    assert part.coefficients.rate.tolist() == [0.1, 0.1, 0.3, 0.3]
    assert part.dot_g is chunk.steps[0].dot_g


def test_the_run_can_be_read_while_it_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read ahead in a thread: two threads cannot read one table of Lance, so it has tables of its own."""
    model = mlp()
    train(tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1), 60)
    store = RunStore.open(tmp_path / "run")
    monkeypatch.setattr(sweep, "CHUNK_BYTES", 1)
    for chunk in backward(store, 60, dtype=torch.float32):
        for _ in range(4):
            assert len(store.read(chunk.row_start, chunk.row_start + 1).step) == 1


BLOCKS = (slice(0, 3), slice(3, 4), slice(4, 13), slice(13, 24))  # with fewer coordinates than rows, and with more


def layer_by_layer(steps: list[Step], w: slice, damped: bool) -> list[Tensor]:
    """The recursion in the coordinates of one block, its curvature rows as they are."""
    p, E = w.stop - w.start, list[Tensor]()
    A, C, one = np.eye(p), np.zeros((p, p)), np.eye(p)
    for step in reversed(steps):
        k = step.coefficients
        assert step.V is not None
        assert step.dot_g is not None
        JG, V = step.G[:, w].numpy(), step.V[:, w].numpy()
        JV = V
        if step.clip < 1:
            assert step.dot_v is not None
            gone = (step.w @ step.G)[w].numpy() * step.norm / (step.norm + 1e-6) / float(step.w @ step.dot_g)
            JG, JV = (step.clip * (x - np.outer(dots.numpy(), gone)) for x, dots in ((JG, step.dot_g), (V, step.dot_v)))
        U = C - k.rate * k.a * A
        S = (1 - k.tau) * U - k.rate * k.n * A
        alpha = damped * step.clip * k.rate * ((1 - k.tau) * k.a + k.n) / (1 - k.momentum)
        E.insert(0, torch.from_numpy(-step.w.numpy()[:, None] * (JG @ S.T)))
        A = (1 - k.rate * k.decay) * A + S @ (JV.T @ np.linalg.inv(np.eye(len(V)) + alpha * V @ V.T) @ V + k.l2 * one)
        C = k.momentum * U
    return E


@pytest.mark.parametrize("contraction", ["never", "always", "when_expanding"])
@pytest.mark.parametrize("clipped", [False, True], ids=["whole", "clipped"])
@pytest.mark.parametrize("rule", ["plain", "momentum", "nesterov", "adam"])
def test_rows_that_steps_share_are_made_orthogonal_in_each_block(rule: str, clipped: bool, contraction: Any) -> None:
    steps, layers = window_steps(rule, clipped, 24), Layers(BLOCKS)
    cuts = [layers.cut(s) for s in steps]
    for w, seen in zip(BLOCKS, zip(*cuts, strict=True), strict=True):
        assert all(s.orthogonal for s in seen)
        assert len({id(s.V) for s in seen}) == 3, "one for each window"
        damped = contraction == "always"
        if contraction == "when_expanding":
            assert not any(map(expands, seen))
        expected = layer_by_layer(steps, w, damped)
        at_once = Propagator(w.stop - w.start, dtype=torch.float64, contraction=contraction).embed(seen)
        adjoint = Adjoint(torch.eye(w.stop - w.start).double(), contraction=contraction)
        for part, x, y in reversed(list(zip(seen, at_once, expected, strict=True))):
            assert_close(x, y, 1e-10)
            assert_close(adjoint.influence(part).T, y, 1e-10)


def test_a_block_that_curvature_leaves_alone_has_no_rows() -> None:
    steps = window_steps("adam", True, 24)
    steps = [s._replace(V=s.V.clone().index_fill_(1, torch.arange(4), 0)) for s in steps if s.V is not None]
    V = steps[0].V
    seen = [Layers([slice(0, 4), slice(4, 24)]).cut(s._replace(V=V))[0] for s in steps]
    assert all(s.V is not None and len(s.V) == 0 for s in seen)
    E = torch.cat(Propagator(4, dtype=torch.float64).embed(seen))
    assert bool(E.isfinite().all())
