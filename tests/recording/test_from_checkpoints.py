"""Runs from checkpoints: the recording itself where every step has its own, else rows at the checkpoint that follows."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.support.adam import adamw
from tests.support.loops import batch_of, cross_entropy, ids_of, mlp, one_backward_each, sgd, terms_of, trained_names
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

from backstory import Recipe, Run, record
from backstory.capture import fingerprint
from backstory.errors import MismatchError, UsageError
from backstory.recording.from_checkpoints import Given, record_checkpoints
from backstory.replay.recipe import take_step
from backstory.run.export import inspect
from backstory.store import RunStore

STEPS, SIZE, CLIP = 6, 3, 0.3
TERMS = terms_of(mlp(), STEPS)
FULL: dict[str, Any] = {"projection": "full", "encoding": "float64"}
LEARNED: dict[str, Any] = {"projection": "learned", "rank": 2, "warmup_steps": 2, "encoding": "float64"}
OPTIMIZERS: dict[str, Any] = {
    "ball": lambda m: sgd(m, 0.2, momentum=0.8, dampening=0.1, weight_decay=0.05),
    "adamw": adamw,
    "amsgrad": lambda m: adamw(m, amsgrad=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.03, betas=(0.8, 0.9), weight_decay=0.1),
}


def make(optimizer: str = "adamw", steps: int = STEPS) -> Recipe:
    model = mlp()
    made = OPTIMIZERS[optimizer](model)
    order = [ids_of(t, SIZE) for t in range(steps)]
    return Recipe(
        model=model, optimizer=made, loss=cross_entropy, batches=[(ids, batch_of(ids)) for ids in order], clip_norm=CLIP,
        schedule=torch.optim.lr_scheduler.StepLR(made, 2, 0.7), queries={"q": batch_of([20, 21])},
    )  # fmt: skip


def trained(path: Path, optimizer: str, **settings: Any) -> tuple[Run, list[Given]]:
    """The recorded run, and the state before every step and after the last."""
    recipe = make(optimizer)
    kept: list[Given] = []
    with record(recipe.model, recipe.optimizer, path, loss_reduction="mean", **settings) as rec:
        for t, (ids, _) in enumerate(recipe.batches):
            kept.append(snapshot(t, recipe))
            with rec.step(ids):
                take_step(recipe, t)
    return Run(path), [*kept, snapshot(STEPS, recipe)]


def snapshot(t: int, recipe: Recipe) -> Given:
    return t, copy.deepcopy(recipe.model.state_dict()), copy.deepcopy(recipe.optimizer.state_dict())


def without_states(kept: list[Given]) -> list[Given]:
    return [(t, weights, None) for t, weights, _ in kept]


def asked(run: Run, recipe: Recipe, at: int | str = "final") -> Tensor:
    return run.query(recipe.model, recipe.loss, recipe.queries["q"], at).scores


def same_rows(a: RunStore, b: RunStore) -> None:
    x, y = (s.read(0, s.n_rows(), samples=True, dtype=torch.float64) for s in (a, b))
    assert x.rows is not None
    assert y.rows is not None
    assert_same(x.rows, y.rows, TERMS)
    assert_same(x.gdot, y.gdot, TERMS)
    assert torch.equal(x.weight, y.weight)
    assert x.samples == y.samples


@pytest.mark.parametrize("states", [True, False])
@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [("ball", FULL), ("ball", LEARNED), ("adamw", LEARNED), ("adamw", FULL), ("amsgrad", LEARNED), ("adam", FULL)],
)
def test_with_the_weights_before_every_step_it_is_the_recording(
    optimizer: str, settings: dict[str, Any], states: bool, tmp_path: Path
) -> None:
    run, kept = trained(tmp_path / "recorded", optimizer, **settings)
    plan = make(optimizer)
    given = kept if states else without_states(kept)
    actual = record_checkpoints(plan, given, tmp_path / "made", nearest="before", **settings)
    same_rows(actual._store, run._store)
    a, b = actual.steps(), run.steps()
    for name in ("clip", "norm", "coverage", "size", "trained"):
        assert_same(torch.from_numpy(getattr(a, name)), torch.from_numpy(getattr(b, name)), TERMS)
    np.testing.assert_allclose(a.drift, b.drift, rtol=0, atol=1e-6)  # of log P, in float32
    assert all((a.groups[k] == b.groups[k]).all() for k in b.groups)
    assert (
        actual.config["fingerprints"][str(STEPS)] == run.config["fingerprints"][str(STEPS)] == fingerprint(plan.model)
    )
    assert_same(asked(actual, plan), asked(run, plan), 2 * TERMS)
    assert "one before every step" in actual.caveats()[0]


@pytest.mark.parametrize("nearest", ["after", "before"])
def test_rows_moments_and_rates_are_those_of_the_nearest_checkpoint(nearest: str, tmp_path: Path) -> None:
    recorded, every = trained(tmp_path / "recorded", "adamw", **FULL)
    kept = [every[i] for i in (0, 2, 5, 6)]
    chosen = [2, 2, 5, 5, 5, 6] if nearest == "after" else [0, 0, 2, 2, 2, 5]
    plan = make()
    run = record_checkpoints(plan, kept, tmp_path / "made", nearest=nearest, **FULL)
    table, P = run.steps(), run._store.diagonal(0, STEPS)
    rows = run._store.read(0, run.n_occurrences, dtype=torch.float64).rows
    assert P is not None
    assert rows is not None
    names = trained_names(plan.model)
    for t, c in enumerate(chosen):
        at = make()
        load(at, every[c])
        expected = one_backward_each(at.model, plan.batches[t][1], cross_entropy, names)
        assert_close(rows[SIZE * t : SIZE * (t + 1)], expected, 1e-12, "Rows of another checkpoint than the nearest.")
        norm = float(expected.mean(0).norm())
        assert table.clip[t] == pytest.approx(min(1.0, CLIP / (norm + 1e-6)), rel=1e-9)
        assert_close(
            P[t].double(), diagonal(at, plan.batches[t][1], step=nearest == "before"), 1e-6, "P of another step."
        )
    truth = recorded.steps()
    assert all((table.groups[k] == truth.groups[k]).all() for k in truth.groups)


def load(recipe: Recipe, kept: Given) -> None:
    _, weights, state = kept
    assert isinstance(weights, dict)
    assert isinstance(state, dict)
    recipe.model.load_state_dict(weights)
    recipe.optimizer.load_state_dict(copy.deepcopy(state))


def diagonal(recipe: Recipe, batch: Any, *, step: bool) -> Tensor:
    """1/(√v̂ + ε) of the optimizer, or after one update with this batch."""
    if step:
        recipe.optimizer.zero_grad()
        cross_entropy(recipe.model, batch).mean().backward()
        nn.utils.clip_grad_norm_(recipe.model.parameters(), CLIP)
        recipe.optimizer.step()
    out = []
    for p in recipe.model.parameters():
        state = recipe.optimizer.state[p]
        out.append(1 / ((state["exp_avg_sq"] / (1 - 0.9 ** state["step"].item())).sqrt() + 1e-6))
    return torch.cat([x.flatten() for x in out])


def test_moments_that_are_not_given_are_averaged_over_the_batches(tmp_path: Path) -> None:
    _, every = trained(tmp_path / "recorded", "adamw", **FULL)
    plan = make()
    run = record_checkpoints(plan, without_states([every[3], every[6]]), tmp_path / "made", **FULL)
    P = run._store.diagonal(0, STEPS)
    assert P is not None
    names = trained_names(plan.model)
    v = torch.zeros(P.shape[1], dtype=torch.float64)
    for t, c in enumerate([3, 3, 3, 6, 6, 6]):
        at = make()
        load(at, every[c])
        g = one_backward_each(at.model, plan.batches[t][1], cross_entropy, names).mean(0)
        g = g * min(1.0, CLIP / (float(g.norm()) + 1e-6))
        v = 0.9 * v + 0.1 * g**2
        assert_close(P[t].double(), 1 / ((v / (1 - 0.9 ** (t + 1))).sqrt() + 1e-6), 1e-6)
    assert any("was not given" in note for note in run.caveats())


@pytest.mark.parametrize("optimizer", ["ball", "adamw"])
def test_the_last_checkpoint_is_the_model_and_others_can_be_asked_too(optimizer: str, tmp_path: Path) -> None:
    _, every = trained(tmp_path / "recorded", optimizer, **LEARNED)
    plan = make(optimizer)
    run = record_checkpoints(plan, [every[2], every[5]], tmp_path / "made", **LEARNED)
    assert run.n_steps == 5
    answer = run.query(plan.model, plan.loss, plan.queries["q"])
    assert (answer.at, len(answer)) == (5, 5 * SIZE)
    assert "reconstructed from 2 checkpoints for 5 steps" in answer.caveats[1]
    assert "follows it" in answer.caveats[1]
    assert "reconstructed from 2 checkpoints" in inspect(tmp_path / "made")["caveats"][0]
    assert run.config["from_checkpoints"]["steps"] == [0, 2, 5]
    earlier = make(optimizer)
    load(earlier, every[2])
    assert run.query(earlier.model, plan.loss, plan.queries["q"], at=2).scores.shape == (2, 2 * SIZE)
    with pytest.raises(MismatchError, match=r"those of step 2, not of step 5\. Pass at=2"):
        run.query(earlier.model, plan.loss, plan.queries["q"])


def test_files_and_functions_stand_for_state_dicts(tmp_path: Path) -> None:
    _, every = trained(tmp_path / "recorded", "adamw", **LEARNED)
    given = [every[3], every[6]]
    for t, weights, _ in given:
        assert isinstance(weights, dict)
        safetensors.torch.save_file(weights, tmp_path / f"{t}.safetensors")
    files: list[Given] = [
        (t, tmp_path / f"{t}.safetensors", partial(dict, s)) for t, _, s in given if isinstance(s, dict)
    ]
    a, b = (record_checkpoints(make(), x, tmp_path / n, **LEARNED) for n, x in (("a", given), ("b", files)))
    same_rows(a._store, b._store)


def test_curvature_that_needs_outputs_gets_them(tmp_path: Path) -> None:
    _, every = trained(tmp_path / "recorded", "adamw", **LEARNED)
    settings = {**LEARNED, "curvature": "exact:2"}
    run = record_checkpoints(make(), [every[6]], tmp_path / "made", outputs="cross-entropy", **settings)
    assert run._store.has_windows
    assert len(run._store.windows.read((0, 6), torch.float64).V) > 6
    with pytest.raises(UsageError, match=r"needs the model's outputs.* step\.outputs_of\(model, kind\)"):
        record_checkpoints(make(), [every[6]], tmp_path / "none", **settings)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    recipe = make()
    one, two = snapshot(1, recipe), snapshot(2, recipe)
    path = tmp_path / "made"
    for wrong in ([], [two, one], [one, one], [snapshot(7, recipe)], [snapshot(0, recipe)]):
        with pytest.raises(UsageError, match="distinct steps in increasing order"):
            record_checkpoints(make(), wrong, path, **FULL)
    with pytest.raises(UsageError, match=r"nearest must be one of .*, got 'next'"):
        record_checkpoints(make(), [one], path, nearest="next", **FULL)
    with pytest.raises(UsageError, match="for every checkpoint, or for none"):
        record_checkpoints(make(), [one, (2, two[1], None)], path, **FULL)
    with pytest.raises(UsageError, match="resume= comes from the recipe"):
        record_checkpoints(make(), [one], path, resume=True, **FULL)
    with pytest.raises(MismatchError, match="does not fit the recipe's model"):
        record_checkpoints(make(), [(1, {}, None)], path, **FULL)
    with pytest.raises(UsageError, match="must be a mapping"):
        record_checkpoints(make(), [(1, lambda: 3, None)], tmp_path / "other", **FULL)  # type: ignore[list-item, return-value]


def test_optimizer_states_must_fit(tmp_path: Path) -> None:
    fresh = make()
    with pytest.raises(MismatchError, match="lacks AdamW's second moment"):
        record_checkpoints(make(), [snapshot(1, fresh)], tmp_path / "a", **FULL)
    weights = fresh.model.state_dict()
    state = torch.optim.AdamW(fresh.model.parameters()).state_dict()
    with pytest.raises(MismatchError, match=r"groups of \[4\] parameters"):
        record_checkpoints(make(), [(1, weights, state)], tmp_path / "b", **FULL)
