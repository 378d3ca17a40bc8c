"""Neighbours are cosines of summed embeddings; influence on single queries is that of the run's own queries."""

import numpy as np
import pytest
import torch
from tests.support.loops import batch_of, cross_entropy, mlp, sgd, train
from torch import nn

import backstory
from backstory import insight
from backstory.errors import UsageError
from backstory.insight.neighbours import _norms
from backstory.run.run import Run


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, nn.Module]:
    path, model = tmp_path_factory.mktemp("neighbours") / "run", mlp()
    train(path, model, sgd(model), 8)
    run = backstory.open(path)
    run.embed()
    return run, model


def test_neighbours_are_cosines_of_summed_embeddings(embedded: tuple[Run, nn.Module]) -> None:
    run, _ = embedded
    E, names = run.embeddings().double().numpy(), run.occurrences()[0]
    ids = sorted(set(names.tolist()))
    sums = np.stack([E[names == name].sum(0) for name in ids])
    j = ids.index("4")
    cosine = sums @ sums[j] / np.linalg.norm(sums, axis=1) / np.linalg.norm(sums[j])
    result = insight.neighbours(run, 4, top=3)
    order = sorted((k for k in range(len(ids)) if k != j), key=lambda k: -cosine[k])[:3]
    assert [x.sample for x in result.neighbours] == [int(ids[k]) for k in order]
    assert [x.similarity for x in result.neighbours] == pytest.approx([cosine[k] for k in order], abs=1e-5)
    assert result.as_dict()["neighbours"][0]["sample"] == int(ids[order[0]])
    assert "neighbours" in result.drawings()
    with pytest.raises(UsageError, match="was never used"):
        insight.neighbours(run, 999)


def test_norms_do_not_depend_on_how_many_are_summed_at_once(embedded: tuple[Run, nn.Module]) -> None:
    run, _ = embedded
    names, inverse = np.unique(run.occurrences()[0], return_inverse=True)
    E = run.embeddings()
    assert np.allclose(_norms(E, inverse, len(names), at_once=2), _norms(E, inverse, len(names)))


@pytest.mark.parametrize("in_memory", [False, True])
def test_influence_on_single_queries(embedded: tuple[Run, nn.Module], in_memory: bool) -> None:
    run, model = embedded
    queries = batch_of([1, 2, 3, 5])
    expected = run.query(model, cross_entropy, queries)
    v, caveats = run.model_at(model).gradients(cross_entropy, queries)
    if in_memory:
        run.load_embeddings()
    result = insight.on_queries(run, v, 4, top=4, caveats=caveats)
    run.drop_embeddings()
    values = {x.query: x.influence for x in (*result.helped, *result.hurt)}
    assert values == pytest.approx(dict(enumerate(expected.sum_over([4]).tolist())), rel=1e-3)
    assert (result.caveats, result.quality) == (expected.caveats, expected.quality)
    assert [x.influence for x in result.helped] == sorted((x.influence for x in result.helped), reverse=True)
    assert torch.isfinite(v).all()
