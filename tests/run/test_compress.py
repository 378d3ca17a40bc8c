"""Compressed runs: the mean of the curvature by hand, the old answers where nothing is averaged, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.loops import batch_of, cross_entropy, ids_of, mlp, normal, sgd
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory import insight
from backstory.errors import StoreError, UsageError
from backstory.maths.shared_curvature import dual
from backstory.run.run import Run
from backstory.run.sweep import Shared, forward
from backstory.store import RunStore
from backstory.store.windows import Windows

STEPS = 8
EXACT: dict[str, Any] = {"dtype": torch.float64, "encoding": "float64"}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, betas=(0.8, 0.9), weight_decay=0.1)


RUNS: dict[str, Any] = {
    "sgd": (lambda m: sgd(m, 0.1), {"projection": "full"}, None),
    "sgd, clipped": (lambda m: sgd(m, 0.1), {"projection": "full"}, 0.1),
    "momentum": (lambda m: sgd(m, 0.05, momentum=0.9, weight_decay=0.1), {"projection": "random", "rank": 2}, 0.1),
    "adamw, diagonal": (adamw, {"projection": "full"}, 0.1),
    "adamw, preconditioned": (adamw, {"projection": "random", "rank": 3}, None),
    "adamw, preconditioned, clipped": (adamw, {"projection": "random", "rank": 3}, 0.1),
}


def recorded(name: str, path: Path, **more: Any) -> Run:
    make, settings, max_norm = RUNS[name]
    model = mlp()
    optimizer = make(model)
    told = {"loss_reduction": "mean", "encoding": "float64", "curvature": "sampled:2", "checkpoints": 4, "steps": STEPS}
    with backstory.record(model, optimizer, path, **{**told, **settings, **more}) as rec:
        for t in range(STEPS):
            optimizer.zero_grad()
            x, y = batch_of(ids_of(t))
            with rec.step(ids_of(t)) as s:
                logits = model(x)
                s.outputs(logits, kind="cross-entropy")
                nn.functional.cross_entropy(logits, y).backward()
                if max_norm is not None:
                    nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                optimizer.step()
        rec.describe([0, 1], text=["zero", "one"], source=["a", "b"])
    run = backstory.open(path)
    run.add_queries("mine", batch_of([1, 2]))
    return run


def queries(run: Run) -> Tensor:
    return normal(2, run.width, seed=3)


def curvatures(run: Run) -> list[Tensor]:
    """H_t = Σ κ h hᵀ of every step, from the table alone."""
    block = run._store.read(0, run.n_occurrences, dtype=torch.float64, curvature=True)
    assert block.curvature is not None
    assert block.kappa is not None
    out = [torch.zeros(run.width, run.width, dtype=torch.float64) for _ in range(STEPS)]
    for t, rows, scales in zip(block.step.tolist(), block.curvature, block.kappa, strict=True):
        for h, kappa in zip(rows, scales, strict=True):
            out[t] += kappa * torch.outer(h, h)
    return out


@pytest.mark.parametrize("name", RUNS)
def test_a_window_for_each_step_changes_nothing(name: str, tmp_path: Path) -> None:
    """In Adam's coordinates ⟨v, ∇L⟩ of a clipped step comes from least squares: to the millionth that is added there."""
    run = recorded(name, tmp_path / "run")
    run.compress(tmp_path / "small", rank=None, windows=STEPS)
    small, v = backstory.open(tmp_path / "small"), queries(run)
    for per_layer in (False, True):
        for contraction in ("always", "never"):
            asked: dict[str, Any] = {"method": "adjoint", "per_layer": per_layer, "contraction": contraction}
            actual, expected = small.query_gradients(v, **asked).scores, run.query_gradients(v, **asked).scores
            assert_close(
                actual, expected, 1e-5 if "preconditioned, clipped" in name else 1e-10, f"{per_layer} {contraction}"
            )


def test_a_window_is_the_mean_of_its_steps(tmp_path: Path) -> None:
    run = recorded("adamw, preconditioned", tmp_path / "run")
    report = run.compress(tmp_path / "small", rank=None, windows=3)
    store, H = backstory.open(tmp_path / "small")._store, curvatures(run)
    spans = store.config["compressed"]["windows"]
    assert [tuple(s) for s in spans] == [(0, 3), (3, 6), (6, 8)]
    assert report.windows == 3
    for lo, hi in spans:
        V = store.windows.read((lo, hi), torch.float64).V
        assert_close(V.T @ V, torch.stack(H[lo:hi]).mean(0), 1e-9, "weights of the steps, or √ of their number")
    assert report.energy == pytest.approx(1.0, abs=1e-9)


def test_a_rank_keeps_the_leading_part(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    report = run.compress(tmp_path / "small", rank=3, windows=1)
    V = backstory.open(tmp_path / "small")._store.windows.read((0, STEPS), torch.float64).V
    values = torch.linalg.eigvalsh(torch.stack(curvatures(run)).mean(0)).flip(0)
    assert V.shape[0] == report.rows == 3
    assert float(V.square().sum()) == pytest.approx(float(values[:3].sum()), rel=0.05)  # gathered in several pieces
    assert report.energy == pytest.approx(float(V.square().sum() / values.sum()), rel=1e-9)
    assert backstory.open(tmp_path / "small").config["compressed"]["energy"] == report.energy


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_embeddings_and_segments_equal_the_adjoint(name: str, per_layer: bool, tmp_path: Path) -> None:
    recorded(name, tmp_path / "run").compress(tmp_path / "small", rank=5, windows=2)
    small = backstory.open(tmp_path / "small")
    v = queries(small)
    for at in (STEPS, 4):
        expected = small.query_gradients(v, at, method="adjoint", per_layer=per_layer).scores
        small.embed(at, per_layer=per_layer, **EXACT)
        actual = small.query_gradients(v, at, method="embeddings", per_layer=per_layer)
        assert actual.method == "embeddings"
        assert_close(actual.scores, expected, 1e-9)
    small.embed(per_layer=per_layer, segments=3, **EXACT)
    again = small.query_gradients(v, 5, per_layer=per_layer)
    assert again.method == "segments"
    assert_close(again.scores, small.query_gradients(v, 5, method="adjoint", per_layer=per_layer).scores, 1e-9)


def test_everything_beside_the_rows_is_carried_over(tmp_path: Path) -> None:
    run = recorded("adamw, preconditioned", tmp_path / "run")
    run.embed()
    run.embed(segments=2)
    report = run.compress(tmp_path / "small")
    small = backstory.open(tmp_path / "small")
    assert small._store.verify() == []
    assert small._store.samples().to_pylist() == run._store.samples().to_pylist()
    kept = [n for n in small._store.tensor_names() if not n.startswith("curvature-")]
    assert kept == [n for n in run._store.tensor_names() if not n.startswith("seg-")]
    old, new = (r._store.read(0, r.n_occurrences, samples=True, dtype=torch.float64) for r in (run, small))
    assert old.samples == new.samples
    for a, b in zip(old[1:6], new[1:6], strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
    assert old.rows is not None
    assert new.rows is not None
    assert_close(new.rows, old.rows, 1e-12)  # rows that are products are split into their factors again
    assert small._store.embeddings() == {}, "embeddings belong to the curvature that made them"
    same = {k: v for k, v in small.config.items() if k in run.config and run.config[k] != v}
    assert same.keys() == {"features", "curvature_rows"}
    assert small.config["features"] == [*run.config["features"], "windows"]
    assert any("retain 100.0% of its trace" in note for note in small.query_gradients(queries(small)).caveats)
    assert report.path == str(tmp_path / "small")
    assert not (tmp_path / "small.partial").exists()


def test_what_was_trained_of_the_gradient_is_carried_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = (lambda m: torch.optim.SGD(m.get_submodule("2").parameters(), lr=0.1), {"projection": "full"}, 0.1)
    monkeypatch.setitem(RUNS, "head", head)
    run = recorded("head", tmp_path / "run")
    run.compress(tmp_path / "small")
    steps = backstory.open(tmp_path / "small").steps()
    assert steps.trained.tolist() == [1.0] * STEPS
    assert steps.coverage.tolist() == run.steps().coverage.tolist()
    assert max(steps.coverage) < 1


def test_the_vector_that_stands_for_the_gradient_knows_it(tmp_path: Path) -> None:
    """⟨n, d⟩ = Σ w ⟨g, ∇L⟩: else clipping would not shrink along the step's own gradient."""
    run = recorded("adamw, preconditioned, clipped", tmp_path / "run")
    steps = [s for chunk in forward(run._store, STEPS, dtype=torch.float64) for s in chunk.steps]
    assert all(s.clip < 1 for s in steps)
    for step in steps:
        assert step.dot_g is not None
        d = dual(step.w, step.G, step.dot_g, step.V, step.dot_v)
        assert step.dot_v is not None
        assert step.V is not None
        assert float((step.w @ step.G) @ d) == pytest.approx(float(step.w @ step.dot_g), rel=1e-3)
        assert_close((step.V @ d)[None], step.dot_v[None], 1e-2)


def test_only_clipped_steps_keep_such_a_vector(tmp_path: Path) -> None:
    recorded("adamw, preconditioned", tmp_path / "run").compress(tmp_path / "small", windows=2)
    recorded("adamw, preconditioned, clipped", tmp_path / "run2").compress(tmp_path / "small2", windows=2)
    free, clipped = (backstory.open(tmp_path / name)._store for name in ("small", "small2"))
    assert free.windows.read((0, 4), torch.float64).d is None
    d = clipped.windows.read((0, 4), torch.float64).d
    assert d is not None
    assert len(d) == 4


def test_a_missing_file_is_damage(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run").compress(tmp_path / "small", windows=2)
    (file,) = (tmp_path / "small").glob("curvature-00000004-*")
    file.unlink()
    assert backstory.open(tmp_path / "small")._store.verify() == ["the curvature of steps 4 to 7 is missing."]


def test_the_config_is_that_of_now(tmp_path: Path) -> None:
    """A run that was opened while it was still being recorded knows how it ended."""
    run = recorded("sgd", tmp_path / "run")
    run._store.config = {k: v for k, v in run._store.config.items() if k != "closed"}
    run.compress(tmp_path / "small")
    assert backstory.open(tmp_path / "small").config["closed"] is True


def test_it_is_not_compressed_while_somebody_records(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    with RunStore.open(tmp_path / "run", write=True), pytest.raises(StoreError):
        run.compress(tmp_path / "small")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_it_is_smaller(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run", encoding="float16", curvature="sampled:16")
    report = run.compress(tmp_path / "small", rank=4, windows=1)
    assert report.bytes_after < report.bytes_before
    assert backstory.open(tmp_path / "small")._store.bytes_per_row < run._store.bytes_per_row / 10


def test_split_runs_get_their_gradient_rows(tmp_path: Path) -> None:
    """There the gradient is the sum of the groups' rows, and kept nowhere else."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5)).double()
    optimizer = adamw(model)
    with backstory.record(model, optimizer, tmp_path / "run", loss_reduction="token-mean", projection="full",
                          curvature="empirical/2", encoding="float64") as rec:  # fmt: skip
        for t in range(4):
            tokens = torch.tensor([[t, 1, 2, 3], [4, 3, t, 1]])
            optimizer.zero_grad()
            with rec.step([2 * t, 2 * t + 1], tokens=torch.tensor([4, 4])):
                nn.functional.cross_entropy(model(tokens).mT, tokens).backward()
                optimizer.step()
    run = backstory.open(tmp_path / "run")
    run.compress(tmp_path / "small", rank=None, windows=4)
    small = backstory.open(tmp_path / "small")
    assert run._store.split
    assert not small._store.split
    old, new = (r._store.read(0, 8, dtype=torch.float64).rows for r in (run, small))
    assert old is not None
    assert new is not None
    assert_close(new, old, 1e-12)
    v = queries(run)
    alike: dict[str, Any] = {"contraction": "always"}
    assert_close(small.query_gradients(v, **alike).scores, run.query_gradients(v, **alike).scores, 1e-9)


def test_what_needs_single_samples_takes_their_gradients(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run").compress(tmp_path / "small")
    small, model = backstory.open(tmp_path / "small"), mlp()
    small.load_weights(model)
    removed = small.predict_removal([1], model, cross_entropy, batch_of([1]))
    assert bool((removed.corrected != removed.plain).all())
    terms = insight.overwriting(small, model, cross_entropy, batch_of([1]), 1)
    assert any("keeps curvature by windows" in note for note in terms.caveats)
    with pytest.raises(UsageError, match="cannot be recorded into"):
        backstory.record(
            model, sgd(model, 0.1), tmp_path / "small", loss_reduction="mean", resume=True, start=STEPS
        ).__enter__()


def windowed(path: Path, **more: Any) -> Run:
    return recorded("adamw, preconditioned, clipped", path, curvature_of="windows", **more)


def test_a_run_with_windows_keeps_them_and_loses_directions(tmp_path: Path) -> None:
    run = windowed(tmp_path / "run")
    whole = run._store.windows.read((0, STEPS), torch.float64)
    report = run.compress(tmp_path / "small", rank=4)
    V, d = backstory.open(tmp_path / "small")._store.windows.read((0, STEPS), torch.float64)
    assert len(V) == report.rows == 4
    values = np.linalg.svd(whole.V.numpy(), compute_uv=False) ** 2
    assert_close(torch.linalg.svdvals(V).square(), torch.from_numpy(values[:4].copy()), 1e-9)
    assert report.energy == pytest.approx(values[:4].sum() / values.sum(), rel=1e-9)
    assert d is not None
    assert whole.d is not None
    assert_close(d, whole.d, 1e-12)
    with pytest.raises(UsageError, match="already keeps its curvature by windows"):
        run.compress(tmp_path / "other", windows=2)


@pytest.mark.parametrize("of", ["windows", "steps"])
def test_another_encoding_is_that_of_a_run_recorded_in_it(of: str, tmp_path: Path) -> None:
    name = "adamw, preconditioned, clipped"
    run = recorded(name, tmp_path / "run", curvature_of=of)
    if of == "steps":
        run.compress(tmp_path / "float64", rank=None, windows=1)
        run = backstory.open(tmp_path / "float64")
    run.compress(tmp_path / "small", rank=None, encoding="int8")
    small, v = backstory.open(tmp_path / "small"), queries(run)
    assert small._store.bytes_per_row < run._store.bytes_per_row
    assert small._store.verify() == []
    expected = run.query_gradients(v).scores
    off = (small.query_gradients(v).scores - expected).norm() / expected.norm()
    assert 1e-4 < off < 0.05, "rounded, and by no more than 8 bits do"


def test_gradients_without_curvature_rows_can_be_encoded_anew(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run", curvature="empirical")
    run.compress(tmp_path / "small", rank=None, windows=STEPS, encoding="float32")
    small, v = backstory.open(tmp_path / "small"), queries(run)
    assert_close(small.query_gradients(v).scores, run.query_gradients(v).scores, 1e-4)


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    with pytest.raises(UsageError, match=r"rank must be at least 1, .*got 0"):
        run.compress(tmp_path / "small", rank=0)
    with pytest.raises(UsageError, match="windows must be at least 1, got 0"):
        run.compress(tmp_path / "small", windows=0)
    with pytest.raises(StoreError, match="already exists"):
        run.compress(tmp_path / "run")
    with pytest.raises(UsageError, match="inside the run itself"):
        run.compress(tmp_path / "run" / "small")
    (tmp_path / "small.partial").mkdir()
    with pytest.raises(StoreError, match="interrupted"):
        run.compress(tmp_path / "small")
    assert (tmp_path / "small.partial").exists(), "it may be under way"
    assert not (tmp_path / "small").exists()
    plain = recorded("sgd", tmp_path / "plain", curvature="empirical")
    with pytest.raises(UsageError, match="no separate curvature samples"):
        plain.compress(tmp_path / "small2")


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded("sgd", tmp_path / "run")

    def full(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Windows, "write", full)
    with pytest.raises(OSError, match="no space"):
        run.compress(tmp_path / "small")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_older_readers_do_not_take_it_for_a_run_without_curvature(tmp_path: Path) -> None:
    recorded("sgd", tmp_path / "run").compress(tmp_path / "small")
    assert json.loads((tmp_path / "small" / "config.json").read_text())["features"] == ["factors", "windows"]


def test_more_windows_than_steps_are_as_many_as_steps(tmp_path: Path) -> None:
    assert recorded("sgd", tmp_path / "run").compress(tmp_path / "small", windows=50).windows == STEPS


def test_other_runs_keep_their_steps(tmp_path: Path) -> None:
    run = recorded("sgd", tmp_path / "run")
    assert Shared(run._store, torch.float64).fill([], 0) == []
