"""Families whose parameters need more than layer rules, recorded as they are (dropout active), and with checkpointed activations.

The others are in `experiments/zoo`.
"""

from dataclasses import replace
from typing import Any

import pytest
from experiments.zoo.families import families
from experiments.zoo.study import one

FAMILIES = families()


@pytest.mark.parametrize(
    "name",
    ["DeBERTa-v2", "OPT", "Mixtral", "T5, batch = length", "CLIP", "Swin", "wav2vec 2.0", "mixture of experts by hand"],
)
def test_rows_are_those_of_one_backward_per_sample(name: str) -> None:
    found = one(FAMILIES[name])
    assert (found["result"], found["coverage"]) == ("recorded", pytest.approx(1))
    assert found["largest_error"] < 1e-9


@pytest.mark.parametrize("name", ["T5", "Swin"])
def test_with_checkpointed_activations(name: str) -> None:
    def make() -> Any:
        model: Any = FAMILIES[name].make()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    found = one(replace(FAMILIES[name], make=make))
    assert found["result"] == "recorded"
    assert found["largest_error"] < 1e-9
