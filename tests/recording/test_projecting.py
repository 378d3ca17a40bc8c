"""Ranks that the energy of the warm-up chooses, against brute force on the true rows in all coordinates."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.recording.test_warmup import between_sides, by_parameter, check_sides, cores_of, wide_batch, wide_net
from tests.support.loops import (
    Interrupted,
    cross_entropy,
    ids_of,
    normal,
    one_backward_each,
    restore,
    same_numbers,
    seeded,
    sgd,
    snapshot,
    stored,
    terms_of,
    train,
    trained_names,
)
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import DiskError, MismatchError
from backstory.integrations.recording import Recording
from backstory.recording.from_checkpoints import record_checkpoints
from backstory.run.export import inspect
from backstory.store import RunStore

AUTO: dict[str, Any] = {
    "projection": "learned",
    "rank": "auto:0.8/4",
    "encoding": "float64",
    "warmup_steps": 4,
    "curvature_of": "steps",
}
STEPS = 7
ROOT = Path(__file__).parents[2]


def recorded(path: Path, size: int = 3, steps: int = STEPS, **settings: Any) -> tuple[nn.Module, Tensor]:
    """A recorded run of 12 -> 9 -> 2, and the true rows of its steps in all coordinates; rank 4 widens to whole sides."""
    model, rows = wide_net(), []

    def look(t: int, ids: Sequence[int]) -> None:
        rows.append(one_backward_each(model, wide_batch(ids), cross_entropy, trained_names(model)))

    train(path, model, sgd(model), steps, size=size, batch=wide_batch, seen=look, **{**AUTO, **settings})
    return model, torch.cat(rows)


def energies(inside: Mapping[str, Tensor]) -> list[list[float]]:
    """Of each parameter's coordinates between its sides: Σ x² over the rows, largest first."""
    return [np.sort(np.square(x.numpy()).sum(0))[::-1].tolist() for x in inside.values()]


def fewest(values: list[list[float]], wanted: float, most: int) -> list[int]:
    """How many of each parameter, one at a time: the largest energy that is left, until there is enough, or `most` of them."""
    kept = [1] * len(values)
    while sum(kept) < most and sum(sum(v[:k]) for v, k in zip(values, kept, strict=True)) < wanted:
        left = [v[k] if k < len(v) else -1.0 for v, k in zip(values, kept, strict=True)]
        kept[left.index(max(left))] += 1
    return kept


@pytest.mark.parametrize("size", [3, 9], ids=["few rows", "many rows"])
@pytest.mark.parametrize(("share", "most"), [(0.3, 4), (0.8, 4), (0.97, 4), (0.3, 2), (0.6, 2)])
def test_the_fewest_coordinates_that_hold_the_share(share: float, most: int, size: int, tmp_path: Path) -> None:
    """Sides three times as wide as the ceiling: all of 12 × 9 for rank 4, and 6 × 6 of them for rank 2."""
    steps = 4 if size == 3 else 13  # 12 rows are fewer, 117 are more than the coordinates of any parameter
    model, rows = recorded(tmp_path / "run", size, steps + 2, rank=f"auto:{share}/{most}", warmup_steps=steps)
    run, n = backstory.open(tmp_path / "run"), steps * size
    sides = check_sides(rows[:n], model, tmp_path / "run")
    assert sides["0.weight"] == ((9, 12) if most == 4 else (6, 6))
    inside, whole = between_sides(rows[:n], model, tmp_path / "run"), float(rows[:n].square().sum())
    values, dims = energies(inside), run._store.dims
    assert dims == fewest(values, share * whole, 999), f"of {[len(v) for v in values]} coordinates"
    held = sum(sum(v[:k]) for v, k in zip(values, dims, strict=True)) / whole
    assert run.config["energy"] == pytest.approx(held, rel=1e-12)
    cores = cores_of(tmp_path / "run")
    expected = torch.cat([x[:, cores[name]] for name, x in between_sides(rows, model, tmp_path / "run").items()], 1)
    kept = stored(tmp_path / "run").rows
    assert_close(kept, expected, 1e-12, "rows are as narrow as the choice")
    ratio = float(kept[:n].square().sum()) / whole
    assert ratio == pytest.approx(held, rel=1e-12), "the rows do not hold what the energies promise"
    assert ratio >= share
    assert run._store.verify() == []


def test_a_larger_share_keeps_more(tmp_path: Path) -> None:
    widths = []
    for share in (0.2, 0.5, 0.8, 0.9, 0.99):
        recorded(tmp_path / str(share), rank=f"auto:{share}/4")
        widths.append(RunStore.open(tmp_path / str(share)).dims)
    for fewer, more in pairwise(widths):
        assert all(a <= b for a, b in zip(fewer, more, strict=True)), f"{fewer} is not inside of {more}"
    assert sum(widths[0]) < sum(widths[-1])


@pytest.mark.parametrize("ceiling", [1, 2])
def test_the_ceiling_is_what_that_rank_would_keep(ceiling: int, tmp_path: Path) -> None:
    model, rows = recorded(tmp_path / "run", rank=f"auto:0.999/{ceiling}")
    recorded(tmp_path / "number", rank=ceiling)
    run, number = (backstory.open(tmp_path / x) for x in ("run", "number"))
    whole, values = float(rows[:12].square().sum()), energies(between_sides(rows[:12], model, tmp_path / "run"))
    assert sum(fewest(values, 0.999 * whole, 999)) > number.width == run.width
    assert run._store.dims == fewest(values, torch.inf, number.width), "not the best so many"
    kept = stored(tmp_path / "run").rows
    assert run.config["energy"] < 0.999
    assert float(kept[:12].square().sum()) / whole == pytest.approx(run.config["energy"], rel=1e-12)


@pytest.mark.parametrize(
    ("rank", "most_dims", "width"),
    [(2, 7, 7), (2, 17, 17), (2, 100, 18), (2, None, 18), ("auto:0.999/4", 7, 7), (2, 1, 4), (12, 50, 50)],
)
def test_a_bound_on_all_coordinates_keeps_the_best_so_many(
    rank: int | str, most_dims: int | None, width: int, tmp_path: Path
) -> None:
    """Rank 2 gives 4 + 8 + 4 + 2; below four there is one for each parameter; all of rank 12 would fit without a core."""
    model, rows = recorded(tmp_path / "run", rank=rank, most_dims=most_dims)
    run, inside = backstory.open(tmp_path / "run"), between_sides(rows[:12], model, tmp_path / "run")
    assert run.width == stored(tmp_path / "run").rows.shape[1] == width
    assert run._store.dims == fewest(energies(inside), torch.inf, width)
    sides = (3, 3) if rank == 2 else (9, 12)
    assert check_sides(rows[:12], model, tmp_path / "run")["0.weight"] == sides, "a bound narrows no side"


def test_a_bound_leaves_other_projections_as_they_are(tmp_path: Path) -> None:
    for kind, width in (("random", 18), ("mask", 18), ("full", 137)):
        recorded(tmp_path / kind, projection=kind, rank=2, most_dims=5)
        assert RunStore.open(tmp_path / kind).width == width


def test_no_more_than_there_is(tmp_path: Path) -> None:
    """Only coordinates between directions that some row has: of two classes a side of the last layer has one."""
    model, rows = recorded(tmp_path / "run", rank="auto:0.9999999999")
    run, G = backstory.open(tmp_path / "run"), by_parameter(rows[:12], model)
    directions = [
        [np.linalg.matrix_rank(np.einsum(m, x, x)) for m in ("bij,bkj->ik", "bij,bik->jk")] for x in G.values()
    ]
    assert directions[2][0] == directions[3][0] == 1
    assert all(k <= out * inner for k, (out, inner) in zip(run._store.dims, directions, strict=True))
    assert run.config["energy"] == pytest.approx(1)
    assert_close(stored(tmp_path / "run").rows[:12].square().sum(1), rows[:12].square().sum(1), 1e-6)


class Line(nn.Module):
    """A matrix without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.other = nn.Linear(12, 9, bias=False), nn.Linear(12, 9, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 12) -> (B, 18)."""
        return torch.cat([self.matrix(x), self.other(x)], 1)


def test_gradients_of_low_rank_need_few_coordinates(tmp_path: Path) -> None:
    """Inputs from a plane, losses linear in the outputs: G = c uᵀ with u of the plane, two numbers for each matrix."""
    model, plane = seeded(Line()), normal(2, 12, seed=5)

    def batch(ids: Sequence[int]) -> tuple[Tensor, ...]:
        return (torch.stack([normal(2, seed=i) for i in ids]) @ plane,)

    def losses(net: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        actual: Tensor = net(*given) @ normal(18, seed=9)
        return actual

    train(tmp_path / "run", model, sgd(model), STEPS, batch=batch, losses=losses, **{**AUTO, "rank": "auto:0.999999"})
    run = backstory.open(tmp_path / "run")
    assert run._store.dims == [2, 2]
    assert run.config["energy"] == pytest.approx(1)


def test_parameters_without_a_gradient_keep_one_number(tmp_path: Path) -> None:
    model = seeded(Line())

    def losses(net: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        actual: Tensor = net(given[0])[:, :9].square().sum(1) + 0 * net(given[0])[:, 9:].sum(1)
        return actual

    train(tmp_path / "run", model, sgd(model, 0.01), STEPS, batch=wide_batch, losses=losses, **AUTO)
    assert RunStore.open(tmp_path / "run").dims[1] == 1


def test_curvature_rows_count_with_their_scale(tmp_path: Path) -> None:
    """Sampled rows: the energy is Σ w‖g‖² + Σ κ‖h‖², of gradient and curvature rows together."""
    model = wide_net()
    with backstory.record(model, sgd(model), tmp_path / "run", loss_reduction="mean", curvature="sampled:2", **{**AUTO, "warmup_steps": 99}) as rec:  # fmt: skip
        optimizer = rec.watcher.reader.optimizer
        for t in range(3):
            optimizer.zero_grad()
            with rec.step(ids_of(t)) as s:
                x, y = wide_batch(ids_of(t))
                out = model(x)
                s.outputs(out, "cross-entropy")
                nn.functional.cross_entropy(out, y).backward()
                optimizer.step()
        waiting = list(module_rows(rec.store))
    whole = sum(float(x.square().sum()) for x in waiting)
    store = RunStore.open(tmp_path / "run")
    block = store.read(0, store.n_rows(), dtype=torch.float64, curvature=True)
    assert block.rows is not None
    assert block.curvature is not None
    assert block.kappa is not None
    kept = (block.weight[:, None] * block.rows.square()).sum() + (block.kappa * block.curvature.square().sum(2)).sum()
    assert float(kept) / whole == pytest.approx(store.config["energy"], rel=1e-6)
    assert store.config["energy"] >= 0.8


def module_rows(store: RunStore) -> list[Tensor]:
    """Every waiting row √κ h, written out from the spool's own tensors."""
    out = []
    for step in store.spool.steps():
        tensors, meta = store.spool.get(step)
        w = torch.tensor(meta["weight"], dtype=torch.float64)
        scales = torch.cat([w[:, None], torch.tensor(meta["kappa"], dtype=torch.float64)], 1).sqrt()
        for key in sorted({k.rsplit("/", 1)[0] for k in tensors}):
            row = int(key.split("/")[0])
            if f"{key}/grads" in tensors:
                G = tensors[f"{key}/grads"].flatten(1)
            else:
                G = torch.einsum("bti,btj->bij", tensors[f"{key}/left"], tensors[f"{key}/right"]).flatten(1)
            out.append(scales[:, row, None] * G)
    return out


@pytest.mark.parametrize("how", ["adjoint", "embeddings"])
def test_a_run_with_everything_kept_answers_as_in_full_coordinates(how: str, tmp_path: Path) -> None:
    """With all steps in the warm-up, all of their energy kept is all that a query can meet."""
    settings: dict[str, Any] = {"warmup_steps": STEPS, "rank": "auto:0.9999999999"}
    answers = []
    for name, more in (("run", settings), ("full", {"rank": 16, "projection": "full"})):
        model, _ = recorded(tmp_path / name, **more)
        run = backstory.open(tmp_path / name)
        if how == "embeddings":
            run.embed(dtype=torch.float64, encoding="float64")
        answers.append(run.query(model, cross_entropy, wide_batch([1, 50]), method=how).scores)
    assert_close(answers[0], answers[1], 1e-5)


# -- going on ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [2, 5])
def test_a_run_that_is_resumed_makes_the_same_choice(stop: int, tmp_path: Path) -> None:
    recorded(tmp_path / "undisturbed")
    model = wide_net()
    optimizer = sgd(model)
    with pytest.raises(Interrupted):
        train(tmp_path / "run", model, optimizer, STEPS, stop=stop, batch=wide_batch, **AUTO)
    held = RunStore.open(tmp_path / "run")
    assert (held.n_steps() or len(held.spool.steps())) == stop
    train(tmp_path / "run", model, optimizer, STEPS, start=stop, batch=wide_batch, **AUTO)
    equal(tmp_path / "run", tmp_path / "undisturbed")


def test_from_the_first_step_again_with_the_choice_that_was_made(tmp_path: Path) -> None:
    recorded(tmp_path / "undisturbed")
    model = wide_net()
    optimizer = sgd(model)
    begin = snapshot(model, optimizer)
    train(tmp_path / "run", model, optimizer, STEPS, batch=wide_batch, **AUTO)
    restore(begin, model, optimizer)
    train(tmp_path / "run", model, optimizer, STEPS, resume=True, start=0, batch=wide_batch, **AUTO)
    equal(tmp_path / "run", tmp_path / "undisturbed")


def equal(one: Path, two: Path) -> None:
    same_numbers(stored(one), stored(two), terms_of(wide_net(), STEPS))
    a, b = RunStore.open(one), RunStore.open(two)
    assert (a.config["blocks"], a.config["layers"]) == (b.config["blocks"], b.config["layers"])
    assert a.config["energy"] == pytest.approx(b.config["energy"], rel=1e-9)
    assert a.verify() == []


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.recording import test_projecting
from tests.support.loops import sgd, train
from tests.recording.test_warmup import wide_batch, wide_net
import backstory.recording.warmup as warmup
import backstory.store.run_store as run_store

place = {"learned": (warmup, "save_bases"), "basis": (warmup, "settle_layout"), "table": (run_store.tables, "commit_overwrite"),
         "rows": (run_store.RunStore, "append")}[sys.argv[2]]
done = getattr(*place)

def dies(*args, **settings):
    if sys.argv[2] == "table":
        done(*args, **settings)  # the table is narrower, the config is not
    os.kill(os.getpid(), signal.SIGKILL)

setattr(*place, dies)
if sys.argv[2] == "learned":
    import backstory.recording.recorder as recorder
    recorder.save_bases = dies
model = wide_net()
train(Path(sys.argv[1]), model, sgd(model), test_projecting.STEPS, batch=wide_batch, **test_projecting.AUTO)
"""


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("learned", marks=pytest.mark.slow),
        "basis",
        pytest.param("table", marks=pytest.mark.slow),
        pytest.param("rows", marks=pytest.mark.slow),
    ],
)
def test_killed_while_the_choice_is_made(place: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{Path(backstory.__path__[0]).parent}{os.pathsep}{ROOT}"}
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-W", "error", "-c", KILLED, str(tmp_path / "run"), place]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = RunStore.open(tmp_path / "run")
    assert (store.n_steps(), store.spool.steps()) == (0, [0, 1, 2, 3])
    assert store.verify() == []
    model, optimizer = replayed(4)
    train(tmp_path / "run", model, optimizer, STEPS, start=4, batch=wide_batch, **AUTO)
    recorded(tmp_path / "undisturbed")
    equal(tmp_path / "run", tmp_path / "undisturbed")


def replayed(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and optimizer after so many steps, as the user's own checkpoint has them."""
    model = wide_net()
    optimizer = sgd(model)
    for t in range(steps):
        optimizer.zero_grad()
        cross_entropy(model, wide_batch(ids_of(t))).mean().backward()
        optimizer.step()
    return model, optimizer


def test_another_share_is_another_run(tmp_path: Path) -> None:
    model = wide_net()
    optimizer = sgd(model)
    train(tmp_path / "run", model, optimizer, 5, batch=wide_batch, **AUTO)
    with pytest.raises(MismatchError, match=r"rank: 'auto:0\.8/4' in the run, 'auto:0\.9/4' now"):
        train(tmp_path / "run", model, optimizer, 6, start=5, batch=wide_batch, **{**AUTO, "rank": "auto:0.9/4"})


# -- who else meets it -------------------------------------------------------------------------------------------------


def test_a_reader_from_before_the_choice_sees_it(tmp_path: Path) -> None:
    early: list[backstory.Run] = []
    model = wide_net()

    def look(t: int, ids: Sequence[int]) -> None:
        if t == 2:
            early.append(backstory.open(tmp_path / "run"))

    train(tmp_path / "run", model, sgd(model), STEPS, batch=wide_batch, seen=look, **{**AUTO, "encoding": "int8"})
    late = backstory.open(tmp_path / "run")
    one, two = (x.query(model, cross_entropy, wide_batch([1])).scores for x in (early[0], late))
    assert_same(one, two, 2 * terms_of(model, STEPS))


def test_what_a_run_says_of_itself(tmp_path: Path) -> None:
    recorded(tmp_path / "run")
    actual = json.loads(json.dumps(inspect(tmp_path / "run", verify=True)))
    assert actual["settings"]["rank"] == "auto:0.8/4"
    assert actual["damage"] == []
    dims = RunStore.open(tmp_path / "run").dims
    assert actual["parameters"]["0.weight"] == f"9 × 12 -> {dims[0]} dimensions"
    assert "rank" in repr(actual["settings"])


def test_from_checkpoints(tmp_path: Path) -> None:
    model = wide_net()
    ids = [ids_of(t) for t in range(4)]
    plan = backstory.Recipe(
        model=model, optimizer=sgd(model), loss=cross_entropy, batches=[(x, wide_batch(x)) for x in ids]
    )
    states = []
    for t in range(4):
        trained, optimizer = replayed(t + 1)
        states.append((t + 1, trained.state_dict(), optimizer.state_dict()))
    run = record_checkpoints(plan, states, tmp_path / "run", nearest="before", **AUTO)
    recorded(tmp_path / "plain")
    assert run._store.dims == RunStore.open(tmp_path / "plain").dims


def test_through_a_trainers_callback(tmp_path: Path) -> None:
    model = wide_net()
    optimizer = sgd(model)
    run = Recording(tmp_path / "run", "mean", None, AUTO)
    run.open(model, optimizer, start=0, steps=None, scaler=None)
    for t in range(STEPS):
        optimizer.zero_grad()
        run.begin()
        run.batch(ids_of(t), 1 / 3)
        cross_entropy(model, wide_batch(ids_of(t))).mean().backward()
        optimizer.step()
        run.end()
    run.close()
    recorded(tmp_path / "plain")
    assert RunStore.open(tmp_path / "run").dims == RunStore.open(tmp_path / "plain").dims


# -- room on the disk --------------------------------------------------------------------------------------------------


def test_a_plan_is_held_against_the_width_that_was_chosen(tmp_path: Path) -> None:
    """The ceiling, 108 + 9 + 18 + 2 numbers of 8 bytes, would not fit 60 times; what is chosen does."""
    narrow: dict[str, Any] = {"rank": "auto:0.3", "max_bytes": 150_000}
    recorded(tmp_path / "run", planned=60, **narrow)
    assert 60 * 3 * 137 * 8 > 150_000
    with pytest.raises(DiskError, match=r"60 steps of .*The 4 earlier steps are safe\. Lower rank="):
        recorded(tmp_path / "wide", planned=60, **{**narrow, "rank": "auto:0.9999", "max_bytes": 40_000})
    assert RunStore.open(tmp_path / "wide").n_steps() == 4
