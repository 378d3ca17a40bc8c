"""What the user chose: checked, frozen, kept as plain values."""

import dataclasses
import json

import pytest

from backstory.errors import UsageError
from backstory.recording.settings import RecordSettings, auto_rank, curvature_of, provenance


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="loss_reduction='avg'; expected one of 'mean', 'sum', 'token-mean', 'weights'"
    ):
        RecordSettings(loss_reduction="avg")
    with pytest.raises(UsageError, match="projection='pca'; expected one of 'learned', 'random', 'mask', 'full'"):
        RecordSettings(loss_reduction="mean", projection="pca")
    with pytest.raises(UsageError, match="encoding 'int4'; expected one of float16, int8, float32, float64"):
        RecordSettings(loss_reduction="mean", encoding="int4")
    for wrong in ({"warmup_steps": 0}, {"warmup_bytes": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            RecordSettings(loss_reduction="mean", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [4, (4, 2), {"a*": 3, "*": (1, 2)}, "auto:0.95", "auto:.5/8"])
def test_settings_survive_json(rank: int | tuple[int, int] | dict[str, int | tuple[int, int]] | str) -> None:
    plain = RecordSettings(loss_reduction="sum", rank=rank).as_config()
    assert plain == json.loads(json.dumps(plain)), "a resumed run compares these with what config.json holds"


def test_settings_are_frozen() -> None:
    settings = RecordSettings(loss_reduction="mean")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3  # type: ignore[misc]


def test_provenance_says_with_what_a_run_was_made() -> None:
    found = provenance("cpu")
    assert {"backstory", "torch", "python", "platform", "device", "torch_initial_seed", "began"} <= found.keys()


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
    form = RecordSettings(loss_reduction="mean", curvature=curvature).curvature_form()
    assert (form.kind, form.passes, form.groups, form.rows, form.split) == (kind, passes, groups, rows, split)


@pytest.mark.parametrize("wrong", ["empirical/0", "empirical/x", "empirical:2", "/6", "sampled:0/3", "exact/3", "auto"])
def test_curvature_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match=f"found curvature='{wrong}'; expected"):
        RecordSettings(loss_reduction="mean", curvature=wrong)


def test_auto_takes_sequences_apart_and_nothing_else() -> None:
    assert curvature_of("auto", "token-mean") == "empirical/6"
    assert {curvature_of("auto", x) for x in ("mean", "sum", "weights")} == {"empirical"}
    assert curvature_of("empirical", "token-mean") == "empirical"


@pytest.mark.parametrize(
    ("rank", "share", "most"), [("auto:0.95", 0.95, 32), ("auto:.5", 0.5, 32), ("auto:0.999/8", 0.999, 8)]
)
def test_a_rank_may_be_a_share_of_the_energy(rank: str, share: float, most: int) -> None:
    assert auto_rank(rank) == (share, most)
    assert RecordSettings(loss_reduction="mean", rank=rank).widths() == most, "shapes begin with the ceiling"


def test_ranks_that_are_numbers_are_no_share() -> None:
    for rank in (16, (4, 2), {"*": 3}):
        assert auto_rank(rank) is None
        assert RecordSettings(loss_reduction="mean", rank=rank).widths() == rank
    assert RecordSettings(loss_reduction="mean", projection="full").widths() is None


@pytest.mark.parametrize(
    "wrong", ["auto", "auto:", "auto:1", "auto:1.0", "auto:0", "auto:0.0", "auto:95", "auto:-0.5", "auto:0.9/0",
              "auto:0.9/x", "auto:0.9/", "16", "AUTO:0.9", "auto: 0.9", "auto:1e-1", ""],
)  # fmt: skip
def test_a_rank_that_means_nothing_is_refused(wrong: str) -> None:
    with pytest.raises(
        UsageError, match=rf"found rank='{wrong}'; expected a whole number.*'auto:S'.*such as 'auto:0.95'"
    ):
        RecordSettings(loss_reduction="mean", rank=wrong)


@pytest.mark.parametrize("projection", ["random", "full", "mask"])
def test_only_a_learned_subspace_knows_the_energy(projection: str) -> None:
    with pytest.raises(
        UsageError,
        match=rf"rank='auto:0.95' with projection='{projection}'; expected projection='learned'.*as a number",
    ):
        RecordSettings(loss_reduction="mean", projection=projection, rank="auto:0.95")
