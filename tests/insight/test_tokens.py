"""Positions of a sequence: their parts add up to the sequence's influence, and each is what a slow oracle says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.adam import Tiny, adamw, group_rows
from tests.support.loops import one_backward_each, seeded, sgd, trained_names
from tests.support.oracles import assert_close
from tests.support.rounding import NoisyRounding
from torch import Tensor, nn

from backstory import Influence, Recipe, Run, record
from backstory.errors import MismatchError, UsageError
from backstory.insight.tokens import CAVEAT, TokenInfluence, tokens
from backstory.recording import adam
from backstory.replay.recipe import take_step

S, STEPS, SIZE, RATE = 5, 6, 3, 0.3
NAME = "tests.insight.test_tokens:make"
LENGTHS = [5, 3, 4, 5, 2, 5, 4, 5, 3]
CAUSES = (
    "A ratio of the number of samples: weights not divided out. Scattered: other positions in one layer than another."
)
Batch = tuple[Tensor, ...]


@pytest.fixture(autouse=True)
def _known_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third step on rows have the scales that were known before it."""
    monkeypatch.setattr(adam, "KNOWN", 2)


def sequences(ids: list[int]) -> Batch:
    """Tokens (B, 5), filled up with token 0, and their lengths (B,)."""
    rows = [torch.randint(1, 7, (S,), generator=torch.Generator().manual_seed(i)) for i in ids]
    lengths = torch.tensor([LENGTHS[i % 9] for i in ids])
    return torch.stack(rows) * (torch.arange(S) < lengths[:, None]), lengths


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """The sum over the tokens that a sequence predicts."""
    each = F.cross_entropy(model(batch[0])[:, :-1].mT, batch[0][:, 1:], reduction="none")
    return (each * (torch.arange(1, S) < batch[1][:, None])).sum(1)


def make(optimizer: str = "sgd", clip: float | None = None, seed: int = 0, tied: bool = False) -> Recipe:
    model = seeded(Tiny(tied), seed)
    order = [[(3 * t + i) % 9 for i in range(SIZE)] for t in range(STEPS)]
    return Recipe(
        model=model,
        optimizer=adamw(model)
        if optimizer == "adamw"
        else sgd(model, RATE, momentum=0.8 if optimizer == "ball" else 0),
        loss=loss,
        batches=[(ids, sequences(ids)) for ids in order],
        loss_reduction="token-mean",
        tokens=lambda batch: batch[1] - 1,
        clip_norm=clip,
        queries={"q": sequences([20, 21])},
    )


def recorded(path: Path, args: dict[str, Any], **settings: Any) -> tuple[Run, Recipe]:
    """The recipe's run with its weights, as a user records it, and the trained recipe."""
    recipe = make(**args)
    stored = {"steps": STEPS, "checkpoints": 1}
    settings = {"encoding": "float64", "rank": 3, "warmup_steps": 2, **stored, **settings}
    with record(
        recipe.model, recipe.optimizer, path, loss_reduction="token-mean", recipe=NAME, recipe_args=args, **settings
    ) as rec:
        for t, (ids, batch) in enumerate(recipe.batches):
            with rec.step(ids, tokens=batch[1] - 1):
                take_step(recipe, t)
    return Run(path), recipe


def answered(run: Run, recipe: Recipe, contraction: Any = "auto") -> Influence:
    return run.query(recipe.model, recipe.loss, recipe.queries["q"], contraction=contraction)


def occurrences() -> list[tuple[int, int]]:
    return [(i, t) for t, (ids, _) in enumerate(make().batches) for i in ids if isinstance(i, int)]


def of(answer: Influence, actual: TokenInfluence) -> Tensor:
    return answer.sum_over([actual.sample], steps=[actual.step])


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain, full": ({}, {"projection": "full", "curvature": "empirical"}),
    "momentum, clipped, learned": ({"optimizer": "ball", "clip": 0.3}, {}),
    "clipped, mask": ({"clip": 0.3}, {"projection": "mask"}),
    "AdamW, learned": ({"optimizer": "adamw"}, {}),
    "AdamW, learned, clipped": ({"optimizer": "adamw", "clip": 0.3}, {}),
    "AdamW, full, clipped": ({"optimizer": "adamw", "clip": 0.3}, {"projection": "full"}),
    "AdamW, random, clipped, tied": ({"optimizer": "adamw", "clip": 0.3, "tied": True}, {"projection": "random"}),
    "AdamW as SGD": ({"optimizer": "adamw"}, {"optimizer_model": "sgd"}),
}


@pytest.mark.parametrize("case", RUNS)
def test_positions_sum_to_the_occurrence(case: str, tmp_path: Path) -> None:
    args, settings = RUNS[case]
    run, recipe = recorded(tmp_path / "run", args, **settings)
    if "clip" in args:
        assert (run.steps().clip < 1).any()
    answer = answered(run, recipe)
    actual = tokens(run, NAME, recipe.queries["q"], occurrences())
    assert [(x.sample, x.step) for x in actual] == occurrences()
    assert all(x.scores.shape == (2, S) for x in actual)
    expected = torch.stack([of(answer, x) for x in actual])
    assert_close(torch.stack([x.scores.sum(1) for x in actual]), expected, 1e-6, CAUSES)
    assert_close(torch.stack([x.total for x in actual]), expected, 1e-12)


def test_the_tokens_are_a_result() -> None:
    scores = torch.tensor([[0.5, -0.25, 0.0], [0.25, -0.25, 0.5]], dtype=torch.float64)
    alone = TokenInfluence("a", 3, scores, scores.sum(1), at=9)
    result = alone.with_texts(["The ", "end", "."])
    told = result.as_dict()
    assert told["tokens"] == [
        {"text": "The ", "influence": 0.375},
        {"text": "end", "influence": -0.25},
        {"text": ".", "influence": 0.25},
    ]
    assert (told["sample"], told["step"], told["at"], told["total"]) == ("a", 3, 9, 0.375)
    assert (told["sign"], told["caveats"]) == (Influence.sign, [CAVEAT])
    assert told["words"] == ["2 of 3 helped, 1 hurt."]
    assert CAVEAT in result.remarks
    assert result.to_pandas().to_dict("list") == {
        "position": [0, 1, 2],
        "text": ["The ", "end", "."],
        "influence": [0.375, -0.25, 0.25],
    }
    bars = result.draw()["data"][0]
    assert (bars["x"], bars["y"]) == ([0.375, -0.25, 0.25], ["0: The ", "1: end", "2: ."])
    assert alone.as_dict()["tokens"][0] == {"text": None, "influence": 0.375}
    assert alone.draw()["data"][0]["y"] == ["0", "1", "2"]


def test_the_tokens_say_what_every_result_of_the_run_says(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", {"optimizer": "adamw"}, optimizer_model="sgd")
    (actual,) = tokens(run, NAME, recipe.queries["q"], occurrences()[:1])
    assert run.caveats()
    assert actual.caveats == (CAVEAT, *run.caveats())
    assert (actual.at, actual.quality) == (STEPS, run.quality())


def test_rounded_rows_leave_a_rounded_sum(tmp_path: Path) -> None:
    """Over all occurrences: where an influence is a small difference of large parts, rounding is larger beside it."""
    run, recipe = recorded(tmp_path / "run", {"optimizer": "adamw", "clip": 0.3}, encoding="float16")
    answer = answered(run, recipe)
    actual = tokens(run, NAME, recipe.queries["q"], occurrences())
    sums, expected = (
        torch.stack(x).flatten() for x in zip(*[(y.scores.sum(1), of(answer, y)) for y in actual], strict=True)
    )
    assert_close(sums, expected, 1e-3, CAUSES)
    assert not torch.equal(sums, expected)


def test_a_position_is_what_one_backward_each_and_an_explicit_product_say(tmp_path: Path) -> None:
    """Each layer called again with the other positions' output gradient at zero; (I − η Σ w g gᵀ) multiplied out."""
    run, trained = recorded(tmp_path / "run", {}, projection="full", curvature="empirical")
    recipe = make()
    names = trained_names(recipe.model)
    apart, factors, weights = [], [], []
    for t, (_, batch) in enumerate(recipe.batches):
        g = one_backward_each(recipe.model, batch, loss, names)  # (B, p)
        w = 1 / float((batch[1] - 1).sum())
        apart.append(group_rows(recipe.model, batch, loss, names, S))  # (B, S, p)
        factors.append(torch.eye(g.shape[1], dtype=torch.float64) - RATE * w * g.T @ g)
        weights.append(w)
        take_step(recipe, t)
    x = one_backward_each(recipe.model, recipe.queries["q"], loss, names)  # (Q, p)
    expected: dict[tuple[int, int], Tensor] = {}
    for t in reversed(range(STEPS)):
        for i, name in enumerate(recipe.batches[t][0]):
            assert isinstance(name, int)
            expected[name, t] = RATE * weights[t] * x @ apart[t][i].T  # (Q, S)
        x = x @ factors[t]
    actual = tokens(run, NAME, trained.queries["q"], occurrences(), contraction="never")
    for one in actual:
        assert isinstance(one.sample, int)
        assert_close(one.scores, expected[one.sample, one.step], 1e-9, CAUSES)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_positions_that_took_no_part_have_nothing(optimizer: str, tmp_path: Path) -> None:
    """Under a causal mask nothing after the last predicting position reaches the loss."""
    run, recipe = recorded(tmp_path / "run", {"optimizer": optimizer, "clip": 0.3})
    for one in tokens(run, NAME, recipe.queries["q"], [(1, 0), (4, 1)]):
        assert isinstance(one.sample, int)
        last = LENGTHS[one.sample] - 1
        assert (one.scores[:, last:] == 0).all()
        assert (one.scores[:, :last] != 0).all()


def test_hits_ready_vectors_and_earlier_models(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", {"optimizer": "ball"}, projection="full")
    batch, loss_fn = recipe.queries["q"], recipe.loss
    hits = answered(run, recipe).top(2, query=0)
    by_hit = tokens(run, NAME, batch, hits, loss_fn=lambda m, b: 2 * loss(m, b))
    pairs = [(h.sample, h.step) for h in hits]
    plain = tokens(run, NAME, batch, pairs)
    assert_close(by_hit[0].scores, 2 * plain[0].scores, 1e-10)
    v = one_backward_each(recipe.model, batch, loss, trained_names(recipe.model))
    assert_close(tokens(run, NAME, None, pairs, vectors=v)[1].scores, plain[1].scores, 1e-10)
    earlier = run.load_weights(make(optimizer="ball").model, 3)
    answer = run.query(earlier, loss_fn, batch, at=3)
    (one,) = tokens(run, NAME, batch, [(0, 0)], at=3)
    assert_close(one.scores.sum(1), of(answer, one), 1e-6)


def test_torchs_generator_is_left_alone(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", {})
    before = torch.get_rng_state()
    tokens(run, NAME, recipe.queries["q"], [(1, 0)])
    assert torch.equal(torch.get_rng_state(), before)


def test_other_rounding_is_no_other_recipe(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", {"optimizer": "adamw", "clip": 0.3})
    query, steps = recipe.queries["q"], (0, 3)
    expected = tokens(run, NAME, query, [(0, t) for t in steps])
    with NoisyRounding():
        actual = tokens(run, NAME, query, [(0, t) for t in steps])
    assert_close(torch.stack([x.scores for x in actual]), torch.stack([x.scores for x in expected]), 1e-10)


def test_another_recipe_is_refused(tmp_path: Path) -> None:
    """One with other weights at the start, which the run does not store."""
    run, recipe = recorded(tmp_path / "run", {}, checkpoints=None)
    query = recipe.queries["q"]
    for path in run.path.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(MismatchError, match="differs from the run at step 0"):
        tokens(run, NAME, query, [(1, 0)], args={"seed": 1})
    with pytest.raises(MismatchError, match="differs from the recorded one"):
        tokens(run, NAME, query, [(1, 0)], args={"seed": 1}, check=False)


def test_stored_weights_are_where_a_replay_starts(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", {}, checkpoints=1)
    query = recipe.queries["q"]
    expected, actual = (tokens(run, NAME, query, [(0, 3)], args={"seed": seed})[0] for seed in (0, 1))
    assert_close(actual.scores, expected.scores, 1e-10)


def test_questions_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    run, recipe = recorded(tmp_path / "run", {})
    query = recipe.queries["q"]
    with pytest.raises(UsageError, match="must be between 0 and 5"):
        tokens(run, NAME, query, [(1, 6)])
    with pytest.raises(UsageError, match="is not used in step 0"):
        tokens(run, NAME, query, [(7, 0)])
    with pytest.raises(UsageError, match="hits must not be empty"):
        tokens(run, NAME, query, [])
    with pytest.raises(UsageError, match="either a query batch, or batch=None and vectors="):
        tokens(run, NAME, None, [(1, 0)])
    with pytest.raises(UsageError, match="vectors must be finite"):
        tokens(run, NAME, None, [(1, 0)], vectors=torch.zeros(2, 3))


def test_a_model_without_positions_is_refused(tmp_path: Path) -> None:
    def flat() -> Recipe:
        model = seeded(nn.Linear(S, 9))
        return replace(
            make(), model=model, optimizer=sgd(model), loss=lambda m, b: m(b[0].double()).square().sum(1), tokens=None,
            loss_reduction="mean",
        )  # fmt: skip

    recipe = flat()
    with record(recipe.model, recipe.optimizer, tmp_path / "run", loss_reduction="mean", projection="full") as rec:
        for t, (ids, _) in enumerate(recipe.batches):
            with rec.step(ids):
                take_step(recipe, t)
    with pytest.raises(UsageError, match="no recorded layer has positions"):
        tokens(Run(tmp_path / "run"), flat, recipe.queries["q"], [(1, 0)])
