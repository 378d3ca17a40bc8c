"""Everything that can go wrong, in one shape: a number, what was found and expected, and what to do; and the names of all fields."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from ..errors import BackstoryError
from .schemas import Failure

log = logging.getLogger("backstory.web")
HINTS = {
    400: "Send the request again in the form that /openapi.json describes.",
    404: "The paths are listed in /openapi.json.",
    405: "Backstory's service is read-only: it answers GET, and POST at /query, /query/image, /query/tokens and /compare.",
    422: "The parameters and their bounds are listed in /openapi.json.",
}
CODES = (400, 401, 403, 404, 405, 413, 415, 422, 429, 503)  # that a request can bring about
PAGE = {"text/html": {"schema": {"type": "string"}}}  # copied for every code: some FastAPI releases write into it
RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {"content": PAGE.copy()},
    **{code: {"model": Failure, "content": PAGE.copy()} for code in CODES},
}
NAMES = {
    "text": "your text",
    "gradient": "the gradient",
    "image": "the image",
    "label": "the label",
    "source": "the source",
    "set": "the query set",
    "index": "the number in the set",
    "text2": "the second text",
    "gradient2": "the second gradient",
    "image2": "the second image",
    "label2": "the second label",
    "set2": "the second query set",
    "index2": "the number in the second set",
    "queries": "the query set",
    "at": "the model's step",
    "top": "how many samples",
    "mistakes": "only mistakes",
    "replay": "the ranking at every checkpoint",
    "overwriting": "what overwrote it",
    "first_step": "from step",
    "last_step": "to step",
    "min_value": "value from",
    "max_value": "value to",
    "without_last": "the last steps to leave out",
    "sort": "the order",
    "by": "what to group by",
    "page": "the page",
    "per": "samples a page",
    "sample": "the samples",
    "ids": "the samples",
    "step": "the steps",
    "format": "the format",
}
LONGEST = 60  # characters of a name that is not ours
BOUNDS = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "literal_error": "{expected}",
}
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "model": "fields with names",
    "dict": "fields with names",
}


class Refusal(BackstoryError):
    """A request that is answered with an error."""

    def __init__(self, code: int, message: str, hint: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{message} {hint}")
        self.code, self.message, self.hint, self.headers = code, message, hint, dict(headers or {})


def refuse(error: Exception) -> Refusal:
    """Any error as one that can be sent; one that nobody expected is logged, and says nothing of the inside."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        return Refusal(422, " ".join(describe_problem(e) for e in error.errors()[:5]), HINTS[422])
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return Refusal(error.status_code, str(error.detail), HINTS.get(error.status_code, HINTS[400]), headers)
    if isinstance(error, BackstoryError):
        return Refusal(422, str(error), "Correct what the message names, and send the request again.")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "something went wrong inside.", "The service's log has the details; please report them.")


def failure(error: Refusal) -> dict[str, Any]:
    """What is sent of it."""
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def describe_problem(error: Mapping[str, Any]) -> str:
    """One problem of validation: which field, what was found, what is expected; never the text that was sent, which may be large."""
    path = [str(x)[:LONGEST] for x in error["loc"]]
    where = path[1:] if len(path) > 1 and path[0] in ("query", "body", "path") else path
    name = where[0] if where else ""
    field = ".".join(where) + (f" ({NAMES[name]})" if name in NAMES else "") if where else "the body"
    if error["type"] == "missing":
        return f"{field}: found nothing; expected a value."
    if error["type"] == "extra_forbidden":
        return f"{field}: found a field that is not known here; expected none of this name."
    return f"{field}: found {_describe_value(error.get('input'))}; expected {_describe_bounds(error)}."


def _describe_value(value: Any) -> str:
    if isinstance(value, str):
        return value if _short_number(value) else f"text of {len(value):,} characters" if value else "nothing"
    if isinstance(value, list | tuple):
        return f"{len(value):,} of them"
    if isinstance(value, bool | int | float) and len(str(value)) <= 20:
        return str(value)
    return "nothing" if value is None else "fields with names" if isinstance(value, Mapping) else "something else"


def _short_number(text: str) -> bool:
    plain = text.strip().lstrip("+-").replace(".", "", 1)
    return len(text) <= 20 and plain.isdecimal() and plain.isascii()


def _describe_bounds(error: Mapping[str, Any]) -> str:
    kind = str(error["type"])
    if kind in BOUNDS:
        return BOUNDS[kind].format(**error.get("ctx", {}))
    return KINDS.get(kind.partition("_")[0], str(error.get("msg", "something else")))
