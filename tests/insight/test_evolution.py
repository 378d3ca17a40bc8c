"""Groups at every checkpoint: by hand, from segments and by reverse sweep."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.insight.runs import Small, loss, small
from tests.support.loops import batch_of, ids_of, mlp, sgd, train

import backstory
from backstory.errors import UsageError
from backstory.insight.evolution import evolution
from backstory.results.words import describe_change

EARLY = list(dict.fromkeys(i for t in range(3) for i in ids_of(t)))


def test_means_are_those_of_the_samples_used_so_far(plain: Small) -> None:
    groups = {"first": EARLY[:3], "others": EARLY[3:]}
    actual = evolution(plain.run, plain.model, loss, plain.queries, by=groups)
    assert actual.checkpoints == (4, 8, 12)
    for j, at in enumerate(actual.checkpoints):
        model = plain.run.load_weights(mlp(), at)
        answer = plain.run.query(model, loss, plain.queries, at, method="adjoint")
        for i, ids in enumerate(groups.values()):
            seen = [x for x in ids if any(x in ids_of(t) for t in range(at))]
            assert actual.mean[i, j] == pytest.approx(float(answer.sum_over(seen).mean()) / len(seen), rel=1e-9)
            assert actual.samples[i, j] == len(seen)


def test_a_group_that_was_not_used_yet_has_no_mean(plain: Small) -> None:
    actual = evolution(plain.run, plain.model, loss, plain.queries, by="steps")
    assert np.isnan(actual.mean[1:, 0]).all()
    assert np.isnan(actual.mean[2, 1])
    assert actual.samples[:, 0].tolist() == [9 if len({*EARLY}) == 9 else len({*EARLY}), 0, 0]
    assert np.isfinite(actual.mean[:, 2]).all()


def test_segments_give_the_same_and_the_model_keeps_its_weights(tmp_path: Path) -> None:
    made = small("adamw, preconditioned, clipped", tmp_path / "run")
    made.run.load_weights(made.model, 4)
    before = {k: v.clone() for k, v in made.model.state_dict().items()}
    swept = evolution(made.run, made.model, loss, made.queries)
    made.run.embed(segments=3, dtype=torch.float64, encoding="float64")
    stored = evolution(made.run, made.model, loss, made.queries)
    assert set(swept.method) == {"adjoint"}
    assert set(stored.method) == {"segments"}
    np.testing.assert_allclose(stored.mean, swept.mean, rtol=1e-8, atol=1e-12)
    assert all(torch.equal(v, before[k]) for k, v in made.model.state_dict().items())


def test_an_answer_in_plain_values(plain: Small) -> None:
    seen: list[tuple[int, int]] = []
    actual = evolution(plain.run, plain.model, loss, plain.queries, progress=lambda *x: seen.append(x))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert list(actual.as_dict()["mean"]) == ["early", "middle", "late"]
    assert len(actual.to_pandas()) == 9
    assert len(actual.figure().data) == 3


def test_a_run_without_checkpoints_says_what_is_missing(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 3)
    (tmp_path / "run" / "checkpoint-00000003.safetensors").unlink()
    with pytest.raises(UsageError, match="Record with steps=…, checkpoints=K"):
        evolution(backstory.open(tmp_path / "run"), model, loss, batch_of([1]))


def test_the_life_of_one_sample_up_to_a_checkpoint(plain: Small) -> None:
    sample = EARLY[0]
    model = plain.run.load_weights(mlp(), 8)
    actual = evolution(plain.run, model, loss, plain.queries, 8, by={"it": [sample]})
    assert (actual.checkpoints, actual.at, actual.groups) == ((4, 8), 8, ("it", "(others)"))
    expected = float(plain.run.query(model, loss, plain.queries, 8).sum_over([sample]).mean())
    alone = actual.only("it")
    assert alone.mean[0, 1] == pytest.approx(expected, rel=1e-9)
    assert len(alone.draw()["data"]) == 1
    assert alone.words == actual.words == (describe_change(actual.mean[0].tolist()),)
    thirds = evolution(plain.run, model, loss, plain.queries, 8)
    falls, rises = np.array([0.04, 0.01]), np.array([0.01, 0.04])
    told = replace(thirds, mean=np.stack([falls, rises, falls])).words
    assert told == (
        f"early, late (each): {describe_change(falls.tolist())}",
        f"middle: {describe_change(rises.tolist())}",
    )
    assert replace(thirds, mean=np.stack([falls] * 3)).words == (f"Each group: {describe_change(falls.tolist())}",)
