"""Every error becomes one shape; what nobody expected says nothing of the inside."""

import logging
from typing import Any

import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from backstory.errors import StoreError, UsageError
from backstory.web.errors import NAMES, Refusal, describe_problem, failure, refuse
from backstory.web.jobs import Stopping
from backstory.web.requests import QueryBody, TokensBody, Upload


def test_an_expected_error_keeps_its_words() -> None:
    for error in (UsageError("rank must be 4, got 3."), StoreError("the run is damaged.")):
        actual = refuse(error)
        assert (actual.code, actual.message) == (422, str(error))
    given = Refusal(429, "full.", "wait", {"Retry-After": "1"})
    assert refuse(given) is given
    assert str(given) == "full. wait"
    assert failure(given) == {"error": {"code": 429, "message": "full.", "hint": "wait"}}


def test_who_asks_while_the_service_ends_may_ask_again() -> None:
    actual = refuse(Stopping())
    assert (actual.code, actual.headers) == (503, {"Retry-After": "5"})


def test_an_error_of_the_framework_keeps_its_number_and_headers() -> None:
    actual = refuse(HTTPException(405, "Method Not Allowed", {"Allow": "GET"}))
    assert (actual.code, actual.headers) == (405, {"Allow": "GET"})
    assert "read-only" in actual.hint


def test_an_unexpected_error_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "backstory.web"):
        actual = refuse(RuntimeError("/secret/path"))
    assert actual.code == 500
    assert "secret" not in actual.message + actual.hint
    assert "/secret/path" in caplog.text


def test_a_refused_value_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as error:
        QueryBody.model_validate({"text": 10**6, "gradient": ["secret"]})
    actual = refuse(error.value)
    assert actual.code == 422
    assert "gradient.0" in actual.message
    assert "secret" not in actual.message


def problems(shape: type[QueryBody | Upload], body: Any) -> str:
    with pytest.raises(ValidationError) as error:
        shape.model_validate(body)
    return " ".join(describe_problem(e) for e in error.value.errors())


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"top": 100000}, "top (results per side) must be at most 200, got 100000."),
        ({"top": "0"}, "top (results per side) must be at least 1, got 0."),
        ({"top": "many"}, "top (results per side) must be a whole number, got 4 characters."),
        ({"top": None}, "top (results per side) must be a whole number, got no value."),
        ({"top": 1.5}, "must be a whole number, got 1.5."),
        ({"text": "a" * 4001}, "text (your text) must have at most 4000 characters, got 4,001 characters."),
        ({"text": ""}, "text (your text) must have 1 or more characters, got an empty text."),
        ({"text": ["a"]}, "text (your text) must be text, got a list of 1 value."),
        ({"gradient": []}, "gradient (the gradient) must have 1 or more values, got a list of 0 values."),
        ({"gradient": ["x"]}, "gradient.0 (the gradient) must be a number, got 1 character."),
        ({"gradient": [float("inf")]}, "must be a finite number, got inf."),
        ({"replay": "perhaps"}, "replay (rankings at every checkpoint) must be true or false, got 7 characters."),
        ({"path": "/etc"}, "path is not a field of this request."),
        ([], "the body must be an object with named fields, got a list of 0 values."),
    ],
)  # fmt: skip
def test_a_field_says_what_it_must_be_and_what_came(body: Any, words: str) -> None:
    assert words in problems(QueryBody, body)


def test_a_missing_field_is_named() -> None:
    assert "sample (the samples) is missing." in problems(TokensBody, {"step": [1]})


def test_what_was_sent_is_not_repeated() -> None:
    words = problems(QueryBody, {"top": "secret", "text": {"secret": "secret"}, "at": "9" * 5000})
    assert "secret" not in words
    assert len(words) < 400


def test_every_field_has_a_name() -> None:
    shapes = (*QueryBody.model_fields, *Upload.model_fields, *TokensBody.model_fields)
    assert set(shapes) <= set(NAMES)
