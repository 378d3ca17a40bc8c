"""The sweep that writes embeddings: the same in pieces, with a report of what it saw, and no silent overflow."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.support.loops import cross_entropy, mlp, sgd, stored, train
from tests.support.oracles import assert_close

import backstory
from backstory.errors import NumericalError, UsageError
from backstory.run import sweep


def test_a_single_step_is_rate_times_weight_times_gradient(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model, 0.25), 1)
    run = backstory.open(tmp_path / "run")
    report = run.embed(dtype=torch.float64, encoding="float64")
    E = run._store.read_embeddings(1, 0, 3, dtype=torch.float64)
    assert_close(E, 0.25 / 3 * stored(tmp_path / "run").rows, 1e-12)
    assert (report.at, report.steps, report.occurrences, report.dims, report.per_layer) == (1, 1, 3, 26, False)
    assert report.form == "implicit where a step expands"
    assert report.as_dict()["seconds"] > 0


@pytest.mark.parametrize("per_layer", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_small_chunks_give_the_same(
    per_layer: bool, momentum: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model, momentum=momentum), 6)
    run = backstory.open(tmp_path / "run")
    run.embed(per_layer=per_layer, dtype=torch.float64, encoding="float64")
    whole = run._store.read_embeddings(6, 0, 18, dtype=torch.float64)
    monkeypatch.setattr(sweep, "CHUNK_BYTES", 1)
    said: list[tuple[int, int]] = []
    run.embed(per_layer=per_layer, dtype=torch.float64, encoding="float64", progress=lambda a, b: said.append((a, b)))
    assert_close(run._store.read_embeddings(6, 0, 18, dtype=torch.float64), whole, 1e-12)
    assert said == [(i, 6) for i in range(1, 7)]


def test_numbers_that_a_sweep_cannot_take_are_refused(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model, 0.25), 1)
    with pytest.raises(UsageError, match=r"dtype must be torch\.float32 or torch\.float64, got torch\.float16"):
        backstory.open(tmp_path / "run").embed(dtype=torch.float16)


@pytest.mark.parametrize(("projection", "fits"), [("full", False), ("learned", True)])
def test_int8_embeddings_need_coordinates_of_one_size(projection: str, fits: bool, tmp_path: Path) -> None:
    """Adam's diagonal spreads those in full coordinates over many orders of magnitude, and one scale cannot follow."""
    model = mlp()
    train(tmp_path / "run", model, torch.optim.AdamW(model.parameters(), 0.01), 8, projection=projection)
    run = backstory.open(tmp_path / "run")
    with nullcontext() if fits else pytest.raises(UsageError, match="encoding='int8' is too coarse"):
        run.embed(encoding="int8")
    assert bool(run._store.embeddings()) == fits


def test_the_largest_growth_and_expanding_steps_are_reported(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, 1.0)

    def rates(t: int, ids: object) -> None:
        optimizer.param_groups[0]["lr"] = 100.0 if t in (1, 3) else 1e-3

    train(tmp_path / "run", model, optimizer, 5, seen=rates)
    run = backstory.open(tmp_path / "run")
    rows = stored(tmp_path / "run").rows
    report = run.embed(contraction="never", dtype=torch.float64)
    expected = {
        t: float(torch.linalg.eigvalsh(100 / 2 / 3 * rows[3 * t : 3 * t + 3] @ rows[3 * t : 3 * t + 3].T)[-1])
        for t in (1, 3)
    }
    assert report.form == "literal"
    assert report.expanding_steps == [t for t in (1, 3) if expected[t] > 1] != []
    assert report.largest_growth == pytest.approx(max(expected.values()), rel=1e-9)
    assert report.largest_growth_step == max(expected, key=lambda t: expected[t])
    assert run.embed(dtype=torch.float64).expanding_steps == []


def test_an_overflow_is_an_error_that_names_the_steps_and_leaves_the_old_embeddings(tmp_path: Path) -> None:
    model = mlp()
    optimizer = sgd(model, 1e-3)

    def rates(t: int, ids: object) -> None:
        optimizer.param_groups[0]["lr"] = 1e-3 if t < 5 else 0.0

    train(tmp_path / "run", model, optimizer, 5, seen=rates)
    run = backstory.open(tmp_path / "run")
    run.embed(dtype=torch.float64, encoding="float64")
    before = run._store.read_embeddings(5, 0, 15, dtype=torch.float64)
    import backstory.run.sweep as sweep

    plain = sweep._coefficients
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "_coefficients", lambda *a: plain(*a)._replace(rate=1e200))
        with pytest.raises(NumericalError, match=r"overflowed in steps 0 to 4.*Use contraction='auto'"):
            run.embed(contraction="never", dtype=torch.float64)
    again = backstory.open(tmp_path / "run")
    assert torch.equal(again._store.read_embeddings(5, 0, 15, dtype=torch.float64), before)


def test_half_precision_embeddings_are_close(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 4)
    run = backstory.open(tmp_path / "run")
    exact = run.query(model, cross_entropy, (torch.ones(1, 3).double(), torch.tensor([1]))).scores
    run.embed()
    rough = run.query(model, cross_entropy, (torch.ones(1, 3).double(), torch.tensor([1])))
    assert rough.method == "embeddings"
    assert_close(rough.scores, exact, 2e-3)


def test_embedding_in_inference_mode(tmp_path: Path) -> None:
    """The mode belongs to a thread, and so does what it marks."""
    model = mlp()
    train(tmp_path / "run", model, sgd(model, momentum=0.9), 6)
    run = backstory.open(tmp_path / "run")
    with torch.inference_mode():
        assert run.embed().occurrences == 18
