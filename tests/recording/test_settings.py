"""What the user chose: checked, frozen, kept as plain values."""

import dataclasses
import json
import re
from typing import Any

import pytest

from backstory.errors import UsageError
from backstory.recording.settings import (
    NAMES,
    AutoRank,
    Curvature,
    Empirical,
    Exact,
    Sampled,
    Settings,
    auto_rank,
    provenance,
    settings_of,
)


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="loss_reduction must be one of 'mean', 'sum', 'token-mean', 'weights', got 'avg'"
    ):
        Settings().resolved("avg")
    with pytest.raises(UsageError, match="uncovered must be one of 'general', 'skip', 'error', got 'maybe'"):
        Settings(uncovered="maybe")
    with pytest.raises(UsageError, match="projection must be one of 'learned', 'random', 'mask', 'full', got 'pca'"):
        Settings(projection="pca")
    with pytest.raises(UsageError, match=r"encoding must be one of 'float16', .*'float64', got 'float'"):
        Settings(encoding="float")


@pytest.mark.parametrize(
    ("wrong", "got"),
    [
        ({"warmup_steps": 0}, "warmup_steps=0"),
        ({"warmup_bytes": 0}, "warmup_bytes=0"),
        ({"most_dims": 0}, "most_dims=0"),
        ({"warmup_bytes": -1, "most_dims": -3}, "warmup_bytes=-1, most_dims=-3"),
    ],
)
def test_numbers_below_one_are_refused_by_name(wrong: dict[str, Any], got: str) -> None:
    with pytest.raises(
        UsageError,
        match=rf"^warmup_steps, warmup_bytes, most_dims, window_rank must be at least 1, got {re.escape(got)}\.$",
    ):
        Settings(**wrong)


@pytest.mark.parametrize(
    ("settings", "bound"),
    [
        ({}, 12_000),
        ({"rank": "auto:0.95"}, 12_000),
        ({"most_dims": 1}, 1),
        ({"most_dims": None}, None),
        ({"projection": "random"}, None),
        ({"projection": "mask", "most_dims": 5}, None),
        ({"projection": "full", "most_dims": 5}, None),
    ],
)
def test_only_a_learned_projection_is_bounded(settings: dict[str, Any], bound: int | None) -> None:
    assert Settings(**settings).bound == bound


@pytest.mark.parametrize("rank", [4, (4, 2), {"a*": 3, "*": (1, 2)}, "auto:0.95", "auto:.5/8"])
def test_settings_survive_json(rank: int | tuple[int, int] | dict[str, int | tuple[int, int]] | str) -> None:
    plain = Settings(rank=rank).as_config()
    assert plain == json.loads(json.dumps(plain)), "a resumed run compares these with what config.json holds"


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3  # type: ignore[misc]


def test_provenance_says_with_what_a_run_was_made() -> None:
    actual = provenance("cpu")
    assert {"backstory", "torch", "python", "platform", "device", "torch_initial_seed", "began"} <= actual.keys()


@pytest.mark.parametrize(
    ("curvature", "kind", "passes", "groups", "rows", "split"),
    [
        ("empirical", "empirical", 0, 1, 0, False),
        ("empirical/1", "empirical", 0, 1, 0, False),
        ("empirical/6", "empirical", 0, 6, 6, True),
        ("sampled", "sampled", 1, 1, 1, False),
        ("sampled:2/6", "sampled", 2, 6, 12, False),
        ("exact:3", "exact", 3, 1, 3, False),
        ("exact:3/2", "exact", 3, 2, 6, False),
    ],
)
def test_forms_of_curvature(curvature: str, kind: str, passes: int, groups: int, rows: int, split: bool) -> None:
    form = Settings(curvature=curvature).form
    assert (form.kind, form.passes, form.position_groups, form.rows, form.split) == (kind, passes, groups, rows, split)


@pytest.mark.parametrize("wrong", ["empirical/0", "empirical/x", "empirical:2", "/6", "sampled:0/3", "exact/3", ""])
def test_curvature_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=f"curvature .*, got '{wrong}'"):
        Settings(curvature=wrong)


def test_auto_takes_sequences_apart_and_nothing_else() -> None:
    assert Settings().resolved("token-mean").curvature == "empirical/6"
    for reduction in ("mean", "sum", "weights"):
        left = Settings().resolved(reduction)
        assert (left.curvature, left.is_open, left.form) == ("auto", True, Empirical()), "the first step decides"
        assert left.resolved("weights") == left, "a trainer's callback resolves first"
        assert Settings(projection="random").resolved(reduction).curvature == "empirical"
    assert Settings(curvature="empirical").resolved("token-mean").curvature == "empirical"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("empirical", Empirical()),
        ("empirical/6", Empirical(position_groups=6)),
        ("sampled:4/6", Sampled(draws=4, position_groups=6)),
        ("exact:10", Exact(outputs=10)),
    ],
)
def test_text_is_the_short_form_of_an_object(text: str, form: Curvature) -> None:
    assert Curvature.parse(text) == form
    assert str(form) == text
    assert Settings(curvature=form) == Settings(curvature=text)
    assert Settings(rank=AutoRank(share=0.95, most=16)) == Settings(rank="auto:0.95/16")


def test_fields_may_be_given_by_name_and_others_are_refused_with_close_ones() -> None:
    assert settings_of(None, {}) == Settings()
    assert settings_of(Settings(rank=4, seed=2), {"rank": 8}) == Settings(rank=8, seed=2)
    with pytest.raises(UsageError, match=r"projektion= is not a recording setting.*Did you mean: projection"):
        settings_of(None, {"projektion": "full"})
    with pytest.raises(UsageError, match=rf"qqq= is not .*Settings are {', '.join(NAMES)}"):
        settings_of(None, {"qqq": 1})
    with pytest.raises(UsageError, match=r"settings must be a backstory\.Settings\(...\), got dict"):
        settings_of({"rank": 8}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "share", "most"), [("auto:0.95", 0.95, 32), ("auto:.5", 0.5, 32), ("auto:0.999/8", 0.999, 8)]
)
def test_a_rank_may_be_a_share_of_the_energy(rank: str, share: float, most: int) -> None:
    assert auto_rank(rank) == AutoRank(share=share, most=most)
    assert Settings(rank=rank).widths() == most, "shapes begin with the ceiling"


def test_ranks_that_are_numbers_are_no_share() -> None:
    for rank in (16, (4, 2), {"*": 3}):
        assert auto_rank(rank) is None
        assert Settings(rank=rank).widths() == rank
    assert Settings(projection="full").widths() is None


@pytest.mark.parametrize(
    "wrong", ["auto", "auto:", "auto:1", "auto:1.0", "auto:0", "auto:0.0", "auto:95", "auto:-0.5", "auto:0.9/0",
              "auto:0.9/x", "auto:0.9/", "16", "AUTO:0.9", "auto: 0.9", "auto:1e-1", ""],
)  # fmt: skip
def test_a_rank_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(
        UsageError, match=rf"rank must be an integer.*'auto:S' \(such as 'auto:0.95'\).*, got '{wrong}'"
    ):
        Settings(rank=wrong)


@pytest.mark.parametrize("projection", ["random", "full", "mask"])
def test_only_a_learned_subspace_knows_the_energy(projection: str) -> None:
    with pytest.raises(
        UsageError,
        match=rf"rank='auto:0.95' needs projection='learned'.*got projection='{projection}'.*as a number",
    ):
        Settings(projection=projection, rank="auto:0.95")
