"""What the user chose: checked, frozen, kept as plain values."""

import dataclasses
import json

import pytest

from backstory.errors import UsageError
from backstory.session.settings import RecordSettings, provenance


def test_unknown_words_are_refused_with_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match="loss_reduction='avg'; expected one of 'mean', 'sum', 'token-mean', 'weights'"
    ):
        RecordSettings(loss_reduction="avg")
    with pytest.raises(UsageError, match="subspace='pca'; expected one of 'learned', 'random', 'mask', 'full'"):
        RecordSettings(loss_reduction="mean", subspace="pca")
    with pytest.raises(UsageError, match="encoding 'int4'; expected one of float16, int8, float32, float64"):
        RecordSettings(loss_reduction="mean", encoding="int4")
    for wrong in ({"warmup_steps": 0}, {"warmup_bytes": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            RecordSettings(loss_reduction="mean", **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("rank", [4, (4, 2), {"a*": 3, "*": (1, 2)}])
def test_settings_survive_json(rank: int | tuple[int, int] | dict[str, int | tuple[int, int]]) -> None:
    plain = RecordSettings(loss_reduction="sum", rank=rank).as_config()
    assert plain == json.loads(json.dumps(plain)), "a resumed run compares these with what config.json holds"


def test_settings_are_frozen() -> None:
    settings = RecordSettings(loss_reduction="mean")
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.seed = 3  # type: ignore[misc]


def test_provenance_says_with_what_a_run_was_made() -> None:
    found = provenance("cpu")
    assert {"backstory", "torch", "python", "platform", "device", "torch_initial_seed", "began"} <= found.keys()
