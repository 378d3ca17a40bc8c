"""Every error becomes one shape; what nobody expected says nothing of the inside."""

import logging

import pytest
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from backstory.errors import StoreError, UsageError
from backstory.web import schemas as shapes
from backstory.web.errors import Refused, failure, refused
from backstory.web.state import Stopped


def test_an_expected_error_keeps_its_words() -> None:
    for error in (UsageError("found 3; expected 4."), StoreError("the run is damaged.")):
        found = refused(error)
        assert (found.code, found.message) == (422, str(error))
    given = Refused(429, "full.", "wait", {"Retry-After": "1"})
    assert refused(given) is given
    assert str(given) == "full. wait"
    assert failure(given).model_dump() == {"error": {"code": 429, "message": "full.", "hint": "wait"}}


def test_who_asks_while_the_service_ends_may_ask_again() -> None:
    found = refused(Stopped())
    assert (found.code, found.headers) == (503, {"Retry-After": "5"})


def test_an_error_of_the_framework_keeps_its_number_and_headers() -> None:
    found = refused(HTTPException(405, "Method Not Allowed", {"Allow": "GET"}))
    assert (found.code, found.headers) == (405, {"Allow": "GET"})
    assert "read-only" in found.hint


def test_an_unexpected_error_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "backstory.web"):
        found = refused(RuntimeError("/secret/path"))
    assert found.code == 500
    assert "secret" not in found.message + found.hint
    assert "/secret/path" in caplog.text


def test_a_refused_value_is_not_repeated() -> None:
    with pytest.raises(ValidationError) as error:
        shapes.Question.model_validate({"text": 10**6, "gradient": ["secret"]})
    found = refused(error.value)
    assert found.code == 422
    assert "gradient.0" in found.message
    assert "secret" not in found.message
