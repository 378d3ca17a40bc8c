"""Shapes hold finite numbers and known fields only, and a question has its bounds."""

import pytest
from pydantic import ValidationError

from backstory.web import schemas as shapes


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        shapes.AtCheckpoint(at=1, influence=value)
    with pytest.raises(ValidationError):
        shapes.Question(gradient=[0.0, value])


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        shapes.Question.model_validate({"text": "a", "path": "/etc/passwd"})


@pytest.mark.parametrize(
    "bad", [{"k": 0}, {"k": shapes.MOST_HITS + 1}, {"text": ""}, {"text": "a" * (shapes.LONGEST_TEXT + 1)}, {"index": -1}, {"at": 0}]
)  # fmt: skip
def test_a_question_has_bounds(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        shapes.Question.model_validate({"text": "a", **bad})
