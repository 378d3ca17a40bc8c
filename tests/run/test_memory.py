"""Embeddings in memory: the same answers as from disk, in several threads, until the run is embedded anew."""

import threading
from pathlib import Path

import pytest
import torch
from tests.support.loops import batch_of, cross_entropy, mlp, sgd, train
from tests.support.oracles import assert_same
from torch import Tensor, nn

import backstory
from backstory import insight
from backstory.errors import UsageError
from backstory.results.influence import Influence
from backstory.run.run import Run
from backstory.store import RunStore

QUERY = batch_of([3, 7])


@pytest.fixture
def embedded(tmp_path: Path) -> tuple[Run, nn.Module]:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 6)
    run = backstory.open(tmp_path / "run")
    run.embed()
    return run, model


def never(*_: object, **__: object) -> Tensor:
    raise AssertionError("the disk was read")


def assert_same_answer(there: Influence, here: Influence) -> None:
    assert_same(there.scores, here.scores, terms=100, dtype=torch.float32)
    for name in ("sample_ids", "steps"):
        assert getattr(there, name).tolist() == getattr(here, name).tolist()
    assert (there.at, there.method, there.caveats, there.quality) == (here.at, here.method, here.caveats, here.quality)


@pytest.mark.parametrize("keep", [None, 3])
def test_answers_from_memory_are_those_from_disk(
    embedded: tuple[Run, nn.Module], keep: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, model = embedded
    there = run.query(model, cross_entropy, QUERY, keep=keep)
    assert run.load_embeddings()
    E = backstory.open(run.path).embeddings()
    monkeypatch.setattr(RunStore, "read_embeddings", never)
    assert_same_answer(there, run.query(model, cross_entropy, QUERY, keep=keep))
    assert torch.equal(run.embeddings(), E)
    run.drop_embeddings()
    with pytest.raises(AssertionError, match="disk"):
        run.query(model, cross_entropy, QUERY)


def test_only_what_is_stored_and_fits_is_loaded(embedded: tuple[Run, nn.Module]) -> None:
    run, _ = embedded
    size = run.embeddings().nbytes
    assert not run.load_embeddings(3)
    assert not run.load_embeddings(room=size - 1)
    assert run.load_embeddings(room=size)


def test_threads_share_what_one_has_loaded(embedded: tuple[Run, nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    run, model = embedded
    there, errors = run.query(model, cross_entropy, QUERY), list[BaseException]()
    run.load_embeddings()
    monkeypatch.setattr(RunStore, "read_embeddings", never)
    v = torch.randn(2, run.width, generator=torch.Generator().manual_seed(0))
    expected = run.query_gradients(v)

    def ask() -> None:
        try:
            again = run.reopen()
            for _ in range(5):
                assert_same_answer(expected, again.query_gradients(v))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    assert_same_answer(there, run.query(model, cross_entropy, QUERY))


def test_other_embeddings_are_not_answered_from_memory(embedded: tuple[Run, nn.Module]) -> None:
    run, model = embedded
    run.load_embeddings()
    run.embed(contraction=5.0, encoding="float32")
    fresh = backstory.open(run.path).query(model, cross_entropy, QUERY, contraction=5.0)
    assert_same_answer(fresh, run.query(model, cross_entropy, QUERY, contraction=5.0))


def test_embeddings_of_another_form_are_not_held(embedded: tuple[Run, nn.Module]) -> None:
    run, model = embedded
    v = run.model_at(model).gradients(cross_entropy, QUERY)[0]
    expected = insight.on_queries(run, v, 3)
    run.load_embeddings()
    run.embed(per_layer=True)
    actual = insight.on_queries(run, v, 3)
    assert not run.load_embeddings()
    again = insight.on_queries(run, v, 3)
    for one in (actual, again):
        for name in ("helped", "hurt"):
            here, there = ([x.influence for x in getattr(o, name)] for o in (one, expected))
            assert here == pytest.approx(there, rel=1e-3), name


def test_a_sample_that_never_occurred_is_refused_from_memory_too(embedded: tuple[Run, nn.Module]) -> None:
    run, model = embedded
    v = run.model_at(model).gradients(cross_entropy, QUERY)[0]
    for _ in ("disk", "memory"):
        with pytest.raises(UsageError, match="never used"):
            insight.on_queries(run, v, 10**6)
        run.load_embeddings()


def test_what_is_handed_out_is_not_the_memory(embedded: tuple[Run, nn.Module]) -> None:
    run, model = embedded
    run.load_embeddings()
    before = run.query(model, cross_entropy, QUERY).scores
    run.embeddings().zero_()
    assert torch.equal(run.query(model, cross_entropy, QUERY).scores, before)
