"""Stored exact results answer queries: of the same batch, loss, step and run, and no other."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.replay.test_reproduction import recorded
from tests.support import examples
from tests.support.oracles import assert_same
from torch import Tensor, nn

import backstory
from backstory import insight
from backstory.errors import UsageError
from backstory.replay.queries import part
from backstory.replay.recipe import take_step
from backstory.results.origin import BY_REPLAY, EXACT
from backstory.run.lookup import keep_ends
from backstory.run.run import Run

BATCH = examples.make().queries["q"]
ROUNDING = 3 * examples.TERMS


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The mean of a set, two of its three queries, and two results that no query may use."""
    run = recorded(tmp_path_factory.mktemp("lookup") / "run", optimizer="momentum")
    run.exact("q", examples.NAME)
    run.exact(["q:0", "q:1"], examples.NAME)
    run.exact("q:2", examples.NAME, since=3)
    return run


def final(run: Run) -> nn.Module:
    return run.load_weights(examples.make().model)


def query(run: Run, batch: Any = BATCH, loss: Any = examples.loss, **options: Any) -> backstory.Influence:
    return run.query(final(run), loss, batch, **options)


def mean_loss(model: nn.Module, batch: Any) -> Tensor:
    return examples.loss(model, batch).mean()


def test_a_stored_mean_is_used_and_says_so(stored: Run) -> None:
    expected = stored.exact("q", examples.NAME)
    actual = query(stored, loss=mean_loss)
    assert torch.equal(actual.scores, expected.scores)
    assert (actual.method, actual.recording, actual.to_exact) == (EXACT, None, None)
    assert actual.origin == BY_REPLAY
    assert actual.brief == "+ helped, − hurt. Exact, through the replayed training."
    assert actual.caveats == expected.caveats
    assert not any("understated" in text for text in actual.remarks)
    assert actual.as_dict()["method"] == EXACT
    assert actual.as_dict()["origin"] == BY_REPLAY


def test_each_query_is_used_where_all_are_stored(stored: Run) -> None:
    two = query(stored, part(BATCH, 0, 2))
    assert torch.equal(two.scores, stored.exact(["q:0", "q:1"], examples.NAME).scores)
    assert two.method == EXACT
    three = query(stored)
    assert three.method == "adjoint", "of the third there are later steps alone"
    assert query(stored, part(BATCH, 2, 3)).method == "adjoint"
    mean = insight.harmful(stored, final(stored), examples.loss, part(BATCH, 0, 2), top=99)
    by_hand = dict(zip(two.per_sample()[0], two.per_sample()[1].mean(0).tolist(), strict=True))
    actual = {x.sample: x.influence for x in (*mean.harmful, *mean.helpful)}
    assert mean.method == EXACT
    assert_same(torch.tensor(list(actual.values())), torch.tensor([by_hand[x] for x in actual]), ROUNDING, size=1.0)
    assert any("mean loss of 2 queries" in text for text in mean.caveats)


@pytest.mark.parametrize("other", [lambda m, b: 2 * mean_loss(m, b), lambda m, b: mean_loss(m, b) + 1e-3])
def test_another_loss_on_the_same_batch_is_not_answered_by_it(stored: Run, other: Any) -> None:
    actual = query(stored, loss=other)
    assert actual.method == "adjoint"
    assert any("is stored, but of another loss" in text for text in actual.caveats)
    assert_same(actual.scores, query(stored, loss=other, method="adjoint").scores, ROUNDING, size=1.0)
    with pytest.raises(UsageError, match="another loss"):
        query(stored, loss=other, method="exact")
    swapped = (BATCH[0], 1 - BATCH[1])
    assert query(stored, swapped, mean_loss).method == "adjoint"


def test_a_method_can_be_chosen(stored: Run) -> None:
    assert query(stored, loss=mean_loss, method="adjoint").method == "adjoint"
    assert query(stored, loss=mean_loss, method="exact").method == EXACT
    assert query(stored, loss=mean_loss, per_layer=True).method == "adjoint", "a form of the recording was chosen"
    assert query(stored, loss=mean_loss, contraction="never").method == "adjoint"
    assert query(stored, loss=mean_loss, mode="train").method == "adjoint"
    with pytest.raises(UsageError, match=r"no exact result of these queries for step 8.*run\.exact\('NAME', recipe\)"):
        query(stored, method="exact")
    with pytest.raises(UsageError, match="must be one of 'auto', 'exact', 'adjoint', 'embeddings'"):
        query(stored, method="guess")
    with pytest.raises(UsageError, match="there is no batch"):
        stored.query(final(stored), lambda m: mean_loss(m, BATCH), method="exact")
    with pytest.raises(UsageError, match="needs the queries themselves"):
        stored.query_gradients(torch.zeros(1, stored.width), method="exact")
    with pytest.raises(UsageError, match="needs mode='eval'"):
        query(stored, method="exact", mode="train")


def test_the_ends_alone(stored: Run) -> None:
    whole, actual = query(stored, part(BATCH, 0, 2)), query(stored, part(BATCH, 0, 2), keep=3)
    assert (actual.method, actual.complete, actual.best) == (EXACT, False, 3)
    for q in (0, 1):
        expected = whole.scores[q].sort(descending=True).values
        assert [h.influence for h in actual.top(3, query=q)] == expected[:3].tolist()
        assert [h.influence for h in actual.bottom(3, query=q)] == expected.flip(0)[:3].tolist()
        best = actual.top(1, query=q)[0]
        assert (
            best.influence
            == whole.occurrences(best.sample, query=q).influence[
                whole.occurrences(best.sample, query=q).steps.index(best.step)
            ]
        )
    assert keep_ends(whole, 99).best is None
    with pytest.raises(UsageError, match="keep must be at least 1"):
        query(stored, loss=mean_loss, keep=0)


def test_the_highest_precision_wins(stored: Run, tmp_path: Path) -> None:
    run = copied(stored, tmp_path)
    single = run.exact("q", examples.NAME, dtype=torch.float32)
    assert torch.equal(query(run, loss=mean_loss).scores, run.exact("q", examples.NAME).scores), (
        "the recipe's is float64"
    )
    (about,) = (x for x in run.exact_results() if x.precision == "float32")
    assert about.computed_in == "float32"
    for file in run.path.glob("exact-*.safetensors"):
        if file.stem not in names_of(run, "float32"):
            file.unlink()
    actual = query(run, loss=mean_loss)
    assert torch.equal(actual.scores, single.scores)
    assert "computed in float32" in actual.caveats


def names_of(run: Run, precision: str) -> set[str]:
    from backstory.run.exact import PREFIX, read_about

    names = [name for name in run._store.tensor_names() if name.startswith(PREFIX)]
    return {name for name in names if read_about(run._store, name).precision == precision}


def copied(run: Run, folder: Path) -> Run:
    shutil.copytree(run.path, folder / "run")
    return backstory.open(folder / "run")


def test_results_from_before_a_resumed_recording_are_not_used(stored: Run, tmp_path: Path) -> None:
    run = copied(stored, tmp_path)
    recipe = examples.make(optimizer="momentum")
    start = run.checkpoints[1]
    for t in range(start):
        take_step(recipe, t)
    with backstory.record(
        recipe.model, recipe.optimizer, run.path, loss_reduction="mean", projection="full", resume=True, start=start,
        recipe=examples.NAME, recipe_args={"optimizer": "momentum"}, steps=8, checkpoints=2,
    ) as rec:  # fmt: skip
        for t in range(start, 8):
            ids, batch = recipe.batches[7 - t]  # other batches than before
            with rec.step(ids):
                recipe.optimizer.zero_grad()
                recipe.loss(recipe.model, batch).mean().backward()
                recipe.optimizer.step()
    again = backstory.open(run.path)
    assert list(again.path.glob("exact-*.safetensors"))
    assert again.exact_results() == []
    actual = again.query(recipe.model, mean_loss, BATCH)
    assert actual.method == "adjoint"
    assert not any("another loss" in text for text in actual.caveats)


def test_a_model_with_other_weights_is_refused_as_ever(stored: Run) -> None:
    with pytest.raises(backstory.BackstoryError, match="the model's weights are those of step 0"):
        stored.query(examples.make().model, mean_loss, BATCH)


def test_without_stored_weights_the_replays_loss_is_stored(stored: Run, tmp_path: Path) -> None:
    run, recipe = copied(stored, tmp_path), examples.make(optimizer="momentum")
    assert 4 not in run.checkpoints
    for t in range(4):
        take_step(recipe, t)
    run.exact("q", examples.NAME, at=4)
    assert run.query(recipe.model, mean_loss, BATCH, at=4, unverified=True).method == EXACT


def test_a_loss_of_the_same_value_with_another_gradient_is_another(stored: Run) -> None:
    def steeper(model: nn.Module, batch: Any) -> Tensor:
        losses = examples.loss(model, batch)
        return 2 * losses - losses.detach()

    for actual in (
        query(stored, loss=lambda m, b: steeper(m, b).mean()),
        query(stored, part(BATCH, 0, 2), steeper),
        query(stored, part(BATCH, 0, 2), lambda m, b: torch.cat([examples.loss(m, b)[:1], steeper(m, b)[1:]])),
    ):
        assert actual.method == "adjoint"
        assert any(
            "is stored, but of another loss (the same value, but a gradient of norm" in x for x in actual.caveats
        )
    frozen = final(stored).requires_grad_(False)
    assert stored.query(frozen, mean_loss, BATCH).method == EXACT
    assert not any(p.requires_grad for p in frozen.parameters())
