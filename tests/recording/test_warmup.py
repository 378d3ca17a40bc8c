"""Learned projections: the basis is the one of the first steps' gradients, and no step is lost to it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.bases import as_matrix
from tests.support.loops import (
    Batch,
    Interrupted,
    batch_of,
    cross_entropy,
    curved,
    ids_of,
    mlp,
    normal,
    one_backward_each,
    seeded,
    sgd,
    stored,
    terms_of,
    train,
    trained_names,
)
from tests.support.oracles import assert_close, assert_same
from tests.support.zoo import ZOO
from torch import Tensor, nn

import backstory
from backstory.errors import StoreError
from backstory.recording.warmup import spooled_bytes, warmup_of
from backstory.store import RunStore

LEARNED: dict[str, Any] = {
    "projection": "learned",
    "rank": (3, 2),
    "encoding": "float64",
    "warmup_steps": 3,
    "curvature_of": "steps",
}


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
    store = RunStore.open(tmp_path / "run")
    shapes = {b["name"]: b["shape"] for b in store.config["blocks"]}
    warm, everything = torch.cat([w.sqrt()[:, None] * x for x in full[:3]]), torch.cat(full)
    sides, cores = check_sides(warm, model, tmp_path / "run"), cores_of(tmp_path / "run")
    inside, expected = between_sides(warm, model, tmp_path / "run"), []
    for n, rows in between_sides(everything, model, tmp_path / "run").items():
        vector, (d_out, d_in, r_out, r_in, kept) = model.get_parameter(n).dim() == 1, shapes[n]
        assert (r_out, r_in) == ((min(12, d_out), 0) if vector else (min(5, d_out), min(3, d_in))), "half as wide again"
        assert sides[n] == (r_out, r_in or 1)
        energies, core = inside[n].square().sum(0).numpy(), cores[n].tolist()
        assert core == sorted(set(core)), "each coordinate once, in order"
        assert len(core) == kept
        assert energies[core].sum() == pytest.approx(np.sort(energies)[::-1][:kept].sum(), rel=1e-12), "not the largest"
        expected.append(rows[:, core])
    assert_close(
        stored(tmp_path / "run").rows, torch.cat(expected, 1), 1e-10, "Were calls squared before they were added?"
    )


def stored_sides(path: Path, name: str, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Both sides of one parameter (d_out, d_in) as matrices, from the run's own file."""
    basis = RunStore.open(path).load_tensors("basis")
    left, right = (as_matrix(basis.get(f"{name}/{side}"), d) for side, d in zip(("left", "right"), sizes, strict=True))
    return left, right


def cores_of(path: Path) -> dict[str, Tensor]:
    """The chosen coordinates of each parameter, by its name; whole numbers."""
    tensors = RunStore.open(path).load_tensors("basis")
    cores = {key.removesuffix("/core"): x for key, x in tensors.items() if key.endswith("/core")}
    assert all(x.dtype == torch.int64 and x.dim() == 1 for x in cores.values())
    return cores


def between_sides(rows: Tensor, model: nn.Module, path: Path) -> dict[str, Tensor]:
    """vec(Lᵀ G R) of true rows between the stored sides of each parameter, (N, n)."""
    out = {}
    for name, G in by_parameter(rows, model).items():
        left, right = stored_sides(path, name, G.shape[1:])
        out[name] = torch.einsum("bij,ir,jk->brk", G, left, right).flatten(1)
    return out


def check_sides(rows: Tensor, model: nn.Module, path: Path) -> dict[str, tuple[int, int]]:
    """How many columns the two sides of each parameter have: eigenvectors of Σ G Gᵀ and Σ Gᵀ G, by numpy, largest first.

    Eigenvectors themselves are free where eigenvalues are equal, so this looks at SᵀMS, which must hold the eigenvalues.
    """
    basis, out = RunStore.open(path).load_tensors("basis"), {}
    for name, G in by_parameter(rows, model).items():
        assert f"{name}/left" in basis, "a side that keeps everything is turned as well"
        assert (f"{name}/right" in basis) == (model.get_parameter(name).dim() > 1)
        sides = stored_sides(path, name, G.shape[1:])
        for S, moment in zip(sides, ("bij,bkj->ik", "bij,bik->jk"), strict=True):
            M, r = torch.einsum(moment, G, G), S.shape[1]
            torch.testing.assert_close(S.T @ S, torch.eye(r, dtype=torch.float64), rtol=0, atol=1e-12)
            best = torch.from_numpy(np.linalg.eigvalsh(M.numpy())[::-1][:r].copy())
            torch.testing.assert_close(S.T @ M @ S, best.diag(), rtol=0, atol=1e-11 * float(best[0]), msg=name)
        out[name] = (sides[0].shape[1], sides[1].shape[1])
    return out


def test_a_run_shorter_than_its_warm_up_is_complete(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 2, **LEARNED)
    run = backstory.open(tmp_path / "run")
    assert run.n_steps == 2
    assert run._store.spool.steps() == []
    assert warmup_of(run._store) == 2
    assert len(run.query(model, cross_entropy, batch_of([0]))) == 6


def test_a_byte_budget_ends_the_warm_up_early(tmp_path: Path) -> None:
    model = mlp()
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model, sgd(model), 4, stop=2, **{**LEARNED, "warmup_steps": 99})
    store = RunStore.open(tmp_path / "run")
    assert store.spool.steps() == [0, 1]
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
    assert run._store.verify() == []
    with pytest.raises(
        StoreError,
        match=r"no complete step yet: 2 warm-up steps are waiting for their projection.*resume=True, start=2",
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
    actual = stored(tmp_path / "run")
    assert actual.samples == [f"ü{i}" for t in range(2) for i in ids_of(t)]
    assert actual.loss[3:].tolist() == expected
    assert bool(actual.loss[:3].isnan().all())


WIDE: dict[str, Any] = {**LEARNED, "rank": 2, "warmup_steps": 4}
STEPS = 7


def wide_net(seed: int = 0) -> nn.Module:
    """12 -> 9 -> 2: its first matrix is wider than three times rank 2 on both sides."""
    return seeded(nn.Sequential(nn.Linear(12, 9), nn.Tanh(), nn.Linear(9, 2)), seed)


def wide_batch(ids: Sequence[int]) -> Batch:
    """Inputs whose directions fade, and two classes."""
    x = torch.stack([normal(12, seed=900 + i) for i in ids]) * torch.arange(1, 13).double() ** -0.7
    return x, torch.tensor([i % 2 for i in ids])


def wide_run(path: Path, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A recorded run, and the true rows of its steps."""
    model, rows = wide_net(), []

    def look(t: int, ids: Sequence[int]) -> None:
        rows.append(one_backward_each(model, wide_batch(ids), cross_entropy, trained_names(model)))

    train(path, model, sgd(model), STEPS, batch=wide_batch, seen=look, **{**WIDE, **settings})
    return model, torch.cat(rows)


def _energy_of_plain_sides(rows: Tensor, model: nn.Module, rank: int) -> tuple[float, int]:
    """`(Σ ‖vec(LᵀGR)‖², coordinates)` with rank × rank sides of each parameter's own moments; vectors keep 4 × rank."""
    energy, dims = 0.0, 0
    for n, G in by_parameter(rows, model).items():
        r_out, r_in = (4 * rank, 1) if model.get_parameter(n).dim() == 1 else (rank, rank)
        L = np.linalg.eigh(torch.einsum("bij,bkj->ik", G, G).numpy())[1][:, -r_out:]
        R = np.linalg.eigh(torch.einsum("bij,bik->jk", G, G).numpy())[1][:, -r_in:]
        energy += float(np.square(np.einsum("bij,ir,jk->brk", G.numpy(), L, R)).sum())
        dims += L.shape[1] * R.shape[1]
    return energy, dims


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_the_kept_coordinates_hold_more_of_the_warm_up_than_as_many_of_plain_sides(rank: int, tmp_path: Path) -> None:
    model, rows = wide_run(tmp_path / "run", rank=rank)
    warm = 3 * 4
    plain, dims = _energy_of_plain_sides(rows[:warm], model, rank)
    store = RunStore.open(tmp_path / "run")
    assert store.width == dims, "a run keeps as many coordinates as rank × rank of each parameter"
    assert sum(b["shape"][4] for b in store.config["blocks"]) == dims
    held = float(stored(tmp_path / "run").rows[:warm].square().sum())
    total = float(rows[:warm].square().sum())
    assert plain < 0.99 * total, "else there is nothing to gain"
    assert held > plain + 0.1 * (total - plain), (
        f"kept {held / total:.4f}, plain sides {plain / total:.4f} of the energy"
    )
    assert held < total * (1 + 1e-6)


def test_coordinates_go_where_the_energy_is(tmp_path: Path) -> None:
    """No coordinate that was left out holds more than one that was kept, but for the first of each parameter."""
    model, rows = wide_run(tmp_path / "run")
    kept, inside = stored(tmp_path / "run").rows, between_sides(rows[:12], model, tmp_path / "run")
    cores, lo, least, most, columns = cores_of(tmp_path / "run"), 0, [], [], []
    for layer in backstory.open(tmp_path / "run").config["layers"]:
        assert layer["offset"] == lo
        x, core = inside[layer["name"]], cores[layer["name"]]
        assert_close(kept[:12, lo : lo + layer["dims"]], x[:, core], 1e-12)
        energies, chosen = x.square().sum(0), torch.zeros(x.shape[1], dtype=torch.bool).index_fill(0, core, True)
        assert layer["dims"] == len(core) == int(chosen.sum())
        if len(core) > 1:
            least.append(float(energies[chosen].min()))
        most.extend(energies[~chosen].tolist())
        columns.append(len(core))
        lo += layer["dims"]
    assert lo == kept.shape[1] == 4 + 8 + 4 + 2
    assert columns != [4, 8, 4, 2], "nothing was shared out anew"
    assert min(least) >= max(most)


def test_where_everything_fits_there_is_no_core_and_answers_are_those_of_full_coordinates(tmp_path: Path) -> None:
    models = {
        "learned": wide_run(tmp_path / "learned", rank=12)[0],
        "full": wide_run(tmp_path / "full", projection="full")[0],
    }
    store = RunStore.open(tmp_path / "learned")
    assert not any(name.endswith("/core") for name in store.load_tensors("basis"))
    assert all(b["shape"][4] == 0 for b in store.config["blocks"])
    learned, full = (
        backstory.open(tmp_path / x).query(model, cross_entropy, wide_batch([1, 50])).scores
        for x, model in models.items()
    )
    assert_close(learned, full, 1e-6)


def uneven(path: Path) -> list[int]:
    """Numbers of each parameter in a row, which are not those of rank × rank."""
    dims = [int(x["dims"]) for x in backstory.open(path).config["layers"]]
    assert dims != [4, 8, 4, 2]
    return dims


@pytest.mark.parametrize("how", ["adjoint", "embeddings"])
def test_each_parameter_by_itself_where_they_keep_unequal_numbers(how: str, tmp_path: Path) -> None:
    """Against the paper's Algorithm 1 on each parameter's own columns."""
    wide_run(tmp_path / "run")
    run, dims = backstory.open(tmp_path / "run"), uneven(tmp_path / "run")
    G, v = stored(tmp_path / "run").rows, normal(2, sum(dims), seed=3)
    expected = torch.zeros(2, len(G), dtype=torch.float64)
    for g, q in zip(G.split(dims, 1), v.split(dims, 1), strict=True):
        K = torch.eye(g.shape[1], dtype=torch.float64)
        for t in reversed(range(STEPS)):
            rows = g[3 * t : 3 * t + 3]
            E = 0.1 / 3 * rows @ K.T
            expected[:, 3 * t : 3 * t + 3] += q @ E.T
            K = K - E.T @ rows
    if how == "embeddings":
        run.embed(per_layer=True, contraction="never", dtype=torch.float64, encoding="float64")
    actual = run.query_gradients(v, method=how, per_layer=True, contraction="never")
    assert actual.method == how
    assert_close(actual.scores, expected, 1e-10)


@pytest.mark.parametrize(("encoding", "step"), [("int8", 0.5 / 127), ("float16", 2.0**-11)])
def test_scales_are_those_of_each_parameters_own_columns(encoding: str, step: float, tmp_path: Path) -> None:
    """No entry is off by more than the rounding of the largest of its own parameter."""
    wide_run(tmp_path / "exact")
    wide_run(tmp_path / "small", encoding=encoding)
    dims = uneven(tmp_path / "exact")
    exact, small = (stored(tmp_path / x).rows.split(dims, 1) for x in ("exact", "small"))
    for x, y in zip(exact, small, strict=True):
        largest = x.abs().amax(1, keepdim=True)
        assert bool(((x - y).abs() <= largest * (step + 1e-12)).all())
        assert_close(y.abs().amax(1), largest[:, 0], 1e-6, "the largest entry of each parameter is kept as it is")


@pytest.mark.parametrize("encoding", ["float64", "int8"])
def test_a_run_that_was_opened_during_its_warm_up_is_read_in_its_new_layout(encoding: str, tmp_path: Path) -> None:
    early: list[backstory.Run] = []
    model = wide_net()

    def look(t: int, ids: Sequence[int]) -> None:
        if t == 2:
            early.append(backstory.open(tmp_path / "run"))

    train(tmp_path / "run", model, sgd(model), STEPS, batch=wide_batch, seen=look, **{**WIDE, "encoding": encoding})
    late = backstory.open(tmp_path / "run")
    for method in ("adjoint", "embeddings"):
        if method == "embeddings":
            late.embed(encoding=encoding)
        one, two = (x.query(model, cross_entropy, wide_batch([1]), method=method).scores for x in (early[0], late))
        assert_same(one, two, 2 * terms_of(model, STEPS))
