"""Rows stored as factors: by themselves, where each sample passes a layer once; the same rows and results from a smaller store."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import (
    FULL,
    Interrupted,
    batch_of,
    cross_entropy,
    ids_of,
    mlp,
    one_backward_each,
    sgd,
    stored,
    train,
)
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.store import RunStore

Trained = tuple[backstory.Run, nn.Module]


def both(tmp_path: Path, **settings: Any) -> tuple[Trained, Trained]:
    """The same training, stored as whole rows and as factors."""
    runs = []
    for name in ("plain", "factors"):
        with pytest.MonkeyPatch.context() as patch:
            if name == "plain":
                patch.setattr(RunStore, "keep_factors", lambda self, factors: None)
            model = mlp(width=9)
            train(tmp_path / name, model, sgd(model, momentum=0.5), 6, **{**FULL, **settings})
        runs.append((backstory.open(tmp_path / name), model))
    return runs[0], runs[1]


def scores(run: backstory.Run, model: nn.Module, method: str) -> Tensor:
    return run.query(model, lambda m, x: cross_entropy(m, x).sum(), batch_of([1, 2]), method=method).scores


@pytest.mark.parametrize("settings", [{}, {"projection": "random", "rank": 3}, {"projection": "mask", "rank": 3}])
def test_rows_and_scores_are_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    (plain, one), (small, two) = both(tmp_path, **settings)
    a, b = stored(tmp_path / "plain"), stored(tmp_path / "factors")
    assert_close(b.rows, a.rows, 1e-12)
    assert (small.config["features"], plain.config["features"]) == (["factors"], [])
    assert small._store.dims == plain._store.dims
    assert small._store.bytes_per_row < plain._store.bytes_per_row
    assert_close(scores(small, two, "adjoint"), scores(plain, one, "adjoint"), 1e-6)
    for run in (plain, small):
        run.embed()
    assert_close(scores(small, two, "embeddings"), scores(plain, one, "embeddings"), 2e-3)
    assert small._store.verify() == []


def test_weights_are_factored_and_neither_biases_nor_learned_coordinates(tmp_path: Path) -> None:
    model = mlp(width=9)
    train(tmp_path / "full", model, sgd(model), 2, **FULL)
    assert [not isinstance(b, int) for b in backstory.open(tmp_path / "full")._store.blocks] == [
        True,
        False,
        True,
        False,
    ]
    model = mlp(width=9)
    train(tmp_path / "learned", model, sgd(model), 2, projection="learned", rank=16)
    assert backstory.open(tmp_path / "learned").config["features"] == ["windows", "own"]


def layer_run(path: Path, *positions: int, calls: int = 1) -> None:
    """One linear layer, called `calls` times in a step, on sequences of these lengths."""
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with backstory.record(model, optimizer, path, loss_reduction="mean", **FULL) as rec:
        for t, length in enumerate(positions):
            x = torch.randn(2, length, 4, generator=torch.Generator().manual_seed(t))
            with rec.step([0, 1]):
                sum(model(x).square().sum() for _ in range(calls)).backward()
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("positions", "calls", "factored"), [((1, 1), 1, True), ((3, 3), 1, False), ((1, 1), 2, False)]
)
def test_what_passes_a_layer_more_than_once_is_stored_whole(
    positions: tuple[int, ...], calls: int, factored: bool, tmp_path: Path
) -> None:
    layer_run(tmp_path / "run", *positions, calls=calls)
    run = backstory.open(tmp_path / "run")
    assert run._store.blocks == ([(5, 4), 5] if factored else [20, 5])
    assert run.n_steps == 2


def test_a_layer_that_is_passed_more_often_later_is_refused_and_the_run_is_whole(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"step 1 a sample passes the layer of 'weight' 3 times .*projection='learned'"
    ):
        layer_run(tmp_path / "run", 1, 3)
    assert backstory.open(tmp_path / "run")._store.verify() == []


def test_a_death_before_the_first_row_leaves_a_run_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table may be that of factors already while the config is not, and the other way round."""
    from backstory.store import files

    def dies(path: Path, value: Any) -> None:
        if value.get("features") == ["factors"]:
            raise Interrupted
        plain(path, value)

    plain = files.write_json
    model = mlp(width=9)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_json", dies)
        with pytest.raises(Interrupted):
            train(tmp_path / "run", model, sgd(model), 1, **FULL)
    model = mlp(width=9)
    G = one_backward_each(model, batch_of(ids_of(0)), cross_entropy, ["0.weight", "0.bias", "2.weight", "2.bias"])
    train(tmp_path / "run", model, sgd(model), 1, resume=True, start=0, **FULL)
    assert backstory.open(tmp_path / "run").config["features"] == ["factors"]
    assert_close(stored(tmp_path / "run").rows, G, 1e-12)
