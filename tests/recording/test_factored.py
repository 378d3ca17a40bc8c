"""Rows kept as factors: the same rows, curvature and answers from a smaller store; what has positions is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.loops import FULL, batch_of, cross_entropy, mlp, sgd, stored, train
from tests.support.oracles import assert_close
from torch import Tensor, nn

import backstory
from backstory.errors import MismatchError, UsageError

ROOMY: dict[str, Any] = {**FULL, "encoding": "float64"}


Trained = tuple[backstory.Run, nn.Module]


def both(tmp_path: Path, **settings: Any) -> tuple[Trained, Trained]:
    """The same training recorded plainly and as factors."""
    found = []
    for name, more in (("plain", {}), ("factored", {"factored": True})):
        model = mlp(width=9)
        train(tmp_path / name, model, sgd(model, momentum=0.5), 6, **{**ROOMY, **settings, **more})
        found.append((backstory.open(tmp_path / name), model))
    return found[0], found[1]


def asked(run: backstory.Run, model: nn.Module, how: str) -> Tensor:
    return run.query(model, lambda m, x: cross_entropy(m, x).sum(), batch_of([1, 2]), method=how).scores


@pytest.mark.parametrize("settings", [{}, {"projection": "random", "rank": 3}, {"projection": "mask", "rank": 3}])
def test_rows_and_answers_are_the_same(settings: dict[str, Any], tmp_path: Path) -> None:
    (plain, one), (small, two) = both(tmp_path, **settings)
    a, b = stored(tmp_path / "plain"), stored(tmp_path / "factored")
    assert_close(b.rows, a.rows, 1e-12)
    assert (small.config["features"], plain.config["features"]) == (["factors"], [])
    assert small.store.dims == plain.store.dims
    assert small.store.bytes_per_row < plain.store.bytes_per_row
    assert_close(asked(small, two, "adjoint"), asked(plain, one, "adjoint"), 1e-6)
    for run in (plain, small):
        run.embed()
    assert_close(asked(small, two, "embeddings"), asked(plain, one, "embeddings"), 2e-3)
    assert small.store.verify() == []


def test_matrices_are_factored_and_learned_coordinates_refused(tmp_path: Path) -> None:
    _, (small, _) = both(tmp_path)
    kept = [b for b in small.store.blocks if not isinstance(b, int)]
    assert len(kept) == 2, "both weights of the net, and no bias"
    model = mlp(width=9)
    with pytest.raises(UsageError, match=r"factored=True with projection='learned'"):
        backstory.record(model, sgd(model), tmp_path / "other", loss_reduction="mean", factored=True)


def test_groups_of_one_position_each_are_kept_as_factors_and_their_sum_is_not(tmp_path: Path) -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {**FULL, "loss_reduction": "token-mean", "curvature": "empirical/3", "factored": True}
    with backstory.record(model, optimizer, tmp_path / "run", **settings) as rec:
        for t in range(3):
            with rec.step([0, 1], tokens=[3, 3]):
                (model(torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(t))).square().sum() / 6).backward()
                optimizer.step()
            optimizer.zero_grad()
    small = backstory.open(tmp_path / "run")
    assert small.store.blocks == [(5, 4), 5]
    small.compress(tmp_path / "small")
    a, b = (backstory.open(tmp_path / name).store.read(0, 6).rows for name in ("run", "small"))
    assert a is not None
    assert b is not None
    assert_close(a, b, 1e-6)


def test_resuming_needs_the_same_setting(tmp_path: Path) -> None:
    both(tmp_path)
    for name, factored in (("plain", True), ("factored", False)):
        model = mlp(width=9)
        with pytest.raises(MismatchError, match="factored"):
            train(
                tmp_path / name,
                model,
                sgd(model, momentum=0.5),
                7,
                resume=True,
                start=6,
                **{**ROOMY, "factored": factored},
            )


def test_what_has_positions_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(4, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    g = torch.Generator().manual_seed(0)
    settings: dict[str, Any] = {**FULL, "loss_reduction": "mean", "factored": True}
    with (
        pytest.raises(UsageError, match="5 × 4 numbers that is not the product of two factors"),
        backstory.record(model, optimizer, tmp_path / "run", **settings) as rec,
    ):
        with rec.step([0, 1]):
            model(torch.randn(2, 3, 4, generator=g)).square().sum().backward()
            optimizer.step()
        rec.flush()
    assert backstory.open(tmp_path / "run").n_steps == 0
