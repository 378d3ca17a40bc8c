"""What is wrong with a field is said in plain words, without what was sent."""

from typing import Any

import pytest
from pydantic import ValidationError

from backstory.web.asking import Shaded, Upload
from backstory.web.fields import NAMES, wrong
from backstory.web.schemas import Question


def said(shape: type[Question | Upload], body: Any) -> str:
    with pytest.raises(ValidationError) as error:
        shape.model_validate(body)
    return " ".join(wrong(e) for e in error.value.errors())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"k": 100000}, "k (how many samples): found 100000; expected at most 200."),
        ({"k": "0"}, "k (how many samples): found 0; expected at least 1."),
        ({"k": "many"}, "k (how many samples): found text of 4 characters; expected a whole number."),
        ({"k": None}, "k (how many samples): found nothing; expected a whole number."),
        ({"k": 1.5}, "found 1.5; expected a whole number."),
        ({"text": "a" * 4001}, "text (your text): found text of 4,001 characters; expected at most 4000 characters."),
        ({"text": ""}, "text (your text): found nothing; expected at least 1 characters."),
        ({"text": ["a"]}, "text (your text): found 1 of them; expected text."),
        ({"gradient": []}, "gradient (the gradient): found 0 of them; expected at least 1 of them."),
        ({"gradient": ["x"]}, "gradient.0 (the gradient): found text of 1 characters; expected a number."),
        ({"gradient": [float("inf")]}, "found inf; expected a finite number."),
        ({"replay": "perhaps"}, "replay (the ranking at every checkpoint): found text of 7 characters; expected true or false."),
        ({"path": "/etc"}, "path: found a field that is not known here; expected none of this name."),
        ([], "the body: found 0 of them; expected fields with names."),
    ],
)  # fmt: skip
def test_a_field_says_what_was_found_and_expected(body: Any, words: str) -> None:
    assert words in said(Question, body)


def test_a_missing_field_is_named() -> None:
    assert "sample (the samples): found nothing; expected a value." in said(Shaded, {"step": [1]})


def test_what_was_sent_is_not_repeated() -> None:
    found = said(Question, {"k": "secret", "text": {"secret": "secret"}, "at": "9" * 5000})
    assert "secret" not in found
    assert len(found) < 400


def test_every_field_has_a_name() -> None:
    shapes = (*Question.model_fields, *Upload.model_fields, *Shaded.model_fields)
    assert set(shapes) <= set(NAMES)
