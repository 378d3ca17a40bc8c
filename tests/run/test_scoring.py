"""Scores come in pieces: put together they are one table, and the kept ends are the ends of that table."""

from pathlib import Path

import pytest
import torch
from tests.support.loops import mlp, normal, sgd, terms_of, train
from tests.support.oracles import assert_close, assert_same

from backstory.run import scoring, sweep
from backstory.run.embed import Form, embed
from backstory.run.scoring import by_adjoint, by_embeddings, collect, collect_best
from backstory.store import RunStore


def test_pieces_in_any_order_make_the_table() -> None:
    scores = normal(2, 10)
    pieces = [(6, scores[:, 6:]), (0, scores[:, :2]), (2, scores[:, 2:6])]
    assert torch.equal(collect(iter(pieces), 2, 10), scores)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_the_ends_are_those_of_the_table(k: int) -> None:
    scores = normal(3, 11)
    pieces = [(lo, scores[:, lo : lo + 3]) for lo in (9, 6, 3, 0)]
    values, rows = collect_best(iter(pieces), 3, k)
    assert torch.equal(values, scores.gather(1, rows))
    for q in range(3):
        order = scores[q].argsort(descending=True).tolist()
        expected = order if 2 * k >= 11 else order[:k] + order[-k:]
        assert sorted(rows[q].tolist()) == sorted(expected)


def test_embeddings_read_in_pieces_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 5)
    with RunStore.open(tmp_path / "run", write=True) as store:
        embed(store, 5, Form(False, "when_expanding", "float64", "float64"))
    store, v = RunStore.open(tmp_path / "run"), normal(2, 26)
    whole = collect(by_embeddings(store, v, 5, 15, None), 2, 15)
    monkeypatch.setattr(scoring, "ROWS_AT_ONCE", 4)
    said: list[tuple[int, int]] = []
    assert_same(collect(by_embeddings(store, v, 5, 15, lambda a, b: said.append((a, b))), 2, 15), whole, store.width)
    assert said == [(4, 15), (8, 15), (12, 15), (15, 15)]
    adjoint = collect(by_adjoint(store, v, 5, per_layer=False, contraction="when_expanding", progress=None), 2, 15)
    assert_close(whole, adjoint, 1e-10)


@pytest.mark.parametrize("per_layer", [False, True])
def test_small_chunks_give_the_same_adjoint(per_layer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model, momentum=0.9), 5)
    store, v = RunStore.open(tmp_path / "run"), normal(2, 26)
    whole = collect(by_adjoint(store, v, 5, per_layer=per_layer, contraction="always", progress=None), 2, 15)
    monkeypatch.setattr(sweep, "CHUNK_BYTES", 1)
    said: list[tuple[int, int]] = []
    actual = collect(
        by_adjoint(store, v, 5, per_layer=per_layer, contraction="always", progress=lambda a, b: said.append((a, b))),
        2,
        15,
    )
    assert_same(actual, whole, 2 * terms_of(model, 5))
    assert said == [(i, 5) for i in range(1, 6)]


def test_equal_scores_are_named_once() -> None:
    _, rows = collect_best(iter([(0, torch.tensor([[5.0, 0, 0, 0, 0, 0, 0, 0]]))]), 1, 3)
    assert len(set(rows[0].tolist())) == 6
