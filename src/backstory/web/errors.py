"""Everything that can go wrong, in one shape: a number, what was found and expected, and what to do."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ..errors import BackstoryError
from .fields import wrong
from .schemas import Failure, Problem

log = logging.getLogger("backstory.web")
HINTS = {
    400: "Send the request again in the form that /openapi.json describes.",
    404: "The paths are listed in /openapi.json.",
    405: "Backstory's service is read-only: it answers GET, and POST at /ask, /ask/image, /ask/tokens and /compare.",
    422: "The parameters and their bounds are listed in /openapi.json.",
}
CODES = (400, 401, 403, 404, 405, 413, 415, 422, 429, 503)  # that a request can bring about
PAGE = {"content": {"text/html": {"schema": {"type": "string"}}}}
ERRORS: dict[int | str, dict[str, Any]] = {code: {"model": Failure, **PAGE} for code in CODES}
RESPONSES: dict[int | str, dict[str, Any]] = {200: PAGE, **ERRORS}


class Refused(BackstoryError):
    """A request that is answered with an error."""

    def __init__(self, code: int, message: str, hint: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{message} {hint}")
        self.code, self.message, self.hint, self.headers = code, message, hint, dict(headers or {})


def refused(error: Exception) -> Refused:
    """Any error as one that can be sent; one that nobody expected is logged, and says nothing of the inside."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        return Refused(422, _said(error), HINTS[422])
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return Refused(error.status_code, str(error.detail), HINTS.get(error.status_code, HINTS[400]), headers)
    if isinstance(error, BackstoryError):
        return Refused(422, str(error), "Mend what the message names, and ask again.")
    log.error("a request failed", exc_info=error)
    return Refused(500, "something went wrong inside.", "The service's log has the details; please report them.")


def failure(error: Refused) -> Failure:
    """What is sent of it."""
    return Failure(error=Problem(code=error.code, message=error.message, hint=error.hint))


def _said(error: RequestValidationError | ValidationError) -> str:
    """Each problem: which field, what was found and what was expected; never the text that was sent, which may be large."""
    return " ".join(wrong(e) for e in error.errors()[:5])
