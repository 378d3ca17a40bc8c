"""Copies and their originals: ranks at each epoch's end, against plain gradients at that epoch's weights."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from experiments.treebank.copies import COSINE, FUNCTION, METHODS, OURS, Asked, Ranks, copies, draw_copies, examples
from experiments.treebank.run import TreebankSetup, drawn, recipe
from experiments.treebank.study import _recorded
from tests.experiments.treebank.test_run import TINY, without_network
from torch import Tensor, nn

import backstory
from backstory.errors import UsageError
from backstory.run.run import Run
from experiments.treebank import copies as treebank_copies

SETUP = TreebankSetup(**TINY)
COUNT = 6


@pytest.fixture(scope="module", autouse=True)
def text() -> Iterator[None]:
    yield from without_network()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _recorded(SETUP, recipe(**TINY), tmp_path_factory.mktemp("copies") / "run", lambda *_: None)


@pytest.fixture(scope="module")
def asked() -> Asked:
    return draw_copies(drawn(SETUP).ids, drawn(SETUP).tokens, COUNT, seed=0)


@pytest.fixture(scope="module")
def actual(run: Run, asked: Asked) -> list[Ranks]:
    return copies(run, recipe(**TINY), asked, SETUP.ends, seed=0, say=lambda *_: None)


def test_copies_are_training_sequences_drawn_by_the_seed(asked: Asked) -> None:
    first = drawn(SETUP)
    assert len(set(asked.ids)) == COUNT
    for name, row in zip(asked.ids, asked.tokens, strict=True):
        assert torch.equal(row, first.tokens[first.ids.index(name)])
    assert draw_copies(first.ids, first.tokens, COUNT, seed=0).ids == asked.ids
    assert draw_copies(first.ids, first.tokens, COUNT, seed=1).ids != asked.ids
    with pytest.raises(UsageError, match="between 3 and 24"):
        draw_copies(first.ids, first.tokens, 25, seed=0)


def test_each_method_speaks_once_at_each_epoch_s_end(actual: list[Ranks]) -> None:
    assert [(one.epoch, one.method) for one in actual] == [(e, m) for e in (1, 2, 3) for m in METHODS]
    assert [one.result.at for one in actual if one.method == OURS] == SETUP.ends
    assert all(one.result.samples == 24 for one in actual)


def test_ours_ranks_by_the_influence_on_the_model_of_that_epoch(actual: list[Ranks], run: Run, asked: Asked) -> None:
    plan = recipe(**TINY)
    for one, at in zip([x for x in actual if x.method == OURS], SETUP.ends, strict=True):
        answer = run.query(run.load_weights(plan.model, at), plan.loss, asked.tokens, at)
        for q, name in enumerate(asked.ids):
            sums = {s: float(answer.scores[q, answer.sample_ids == s].sum()) for s in set(answer.sample_ids.tolist())}
            assert one.result.rank[q] == 1 + sum(x > sums[name] for x in sums.values())
            assert one.first[q].sample == max(sums, key=sums.__getitem__)
            assert one.first[q].influence == pytest.approx(max(sums.values()))


def test_the_other_methods_see_the_weights_of_that_epoch(
    run: Run, asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All coordinates, so that plain gradients of one sequence at a time give the same scores."""
    monkeypatch.setattr(treebank_copies, "RANK", None)
    monkeypatch.setattr(
        treebank_copies, "DAMPING", 3.0
    )  # with fewer sequences than weights, little is left beside a small one
    plan, first = recipe(**TINY), drawn(SETUP)
    scores = {
        (one.epoch, one.method): one.best
        for one in copies(run, plan, asked, SETUP.ends[:2], seed=0, say=lambda *_: None)
    }
    for epoch, at in enumerate(SETUP.ends[:2], 1):
        model = run.load_weights(plan.model, at)
        G = torch.stack([gradient(model, x) for x in first.tokens])  # (N, p)
        V = torch.stack([gradient(model, x) for x in asked.tokens])
        H = G.T @ G / len(G) + 3.0 * torch.eye(G.shape[1], dtype=G.dtype)
        expected = {
            FUNCTION: V @ torch.linalg.solve(H, G.T) / len(G),
            COSINE: V @ G.T / V.norm(dim=1)[:, None] / G.norm(dim=1),
        }
        for method, table in expected.items():
            for q in range(3):
                told = [hit["influence"] for hit in scores[epoch, method][q]]
                assert told == pytest.approx(table[q].sort(descending=True).values[:3].tolist(), rel=2e-3)


def gradient(model: nn.Module, tokens: Tensor) -> Tensor:
    """Of one sequence's loss in all parameters, by one backward pass, in float64."""
    logits = model(tokens[None, :-1])[0]
    loss = nn.functional.cross_entropy(logits, tokens[1:], reduction="sum")
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).double()


def test_examples_carry_the_texts_of_what_is_named(actual: list[Ranks], asked: Asked) -> None:
    first = drawn(SETUP)
    texts = dict(zip(first.ids, first.texts, strict=True))
    shown = examples(actual, asked, texts)
    assert [one["id"] for one in shown] == asked.ids[:3]
    for k, one in enumerate(shown):
        assert one["text"] == texts[asked.ids[k]]
        assert [n["rank"] for n in one["named"]] == [r.result.rank[k] for r in actual]
        for named in one["named"]:
            assert all(hit["text"] == texts[hit["id"]] for hit in named["best"])
            assert all(hit["own"] == (hit["id"] == one["id"]) for hit in named["best"])
            assert all((hit["step"] is None) == (named["method"] != OURS) for hit in named["best"])
            assert (named["rank"] == 1) == named["best"][0]["own"]
        cosine = next(n for n in one["named"] if n["method"] == COSINE)
        assert cosine["best"][0]["common"] == sorted(
            {w for w in one["text"].replace("<eos>", "").split() if len(w) > 3}
        )


def test_the_model_s_run_is_left_as_it_was(run: Run) -> None:
    assert backstory.open(Path(run.path)).n_steps == 18
