"""All errors of the service in one shape: an HTTP code, what is wrong and what to do; and the names of all fields."""

import logging
from collections.abc import Mapping, Sized
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
    "index": "the query index",
    "text2": "the second text",
    "gradient2": "the second gradient",
    "image2": "the second image",
    "label2": "the second label",
    "set2": "the second query set",
    "index2": "the second query index",
    "queries": "the query set",
    "at": "the model's step",
    "top": "results per side",
    "mistakes": "only mistakes",
    "replay": "rankings at every checkpoint",
    "overwriting": "what overwrote it",
    "first_step": "from step",
    "last_step": "to step",
    "min_value": "value from",
    "max_value": "value to",
    "without_last": "the last steps to leave out",
    "sort": "the order",
    "by": "what to group by",
    "page": "the page",
    "per": "samples per page",
    "sample": "the samples",
    "ids": "the samples",
    "step": "the steps",
    "format": "the format",
}
LONGEST = 60  # characters of a name that is not ours
BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "less_than_equal": "must be at most {le}",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have {min_length} or more values",
    "too_long": "must have at most {max_length} values",
    "literal_error": "must be {expected}",
}
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "model": "an object with named fields",
    "dict": "an object with named fields",
}


class Refusal(BackstoryError):
    """A request that is answered with an error."""

    def __init__(self, code: int, message: str, hint: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{message} {hint}")
        self.code, self.message, self.hint, self.headers = code, message, hint, dict(headers or {})


def refuse(error: Exception) -> Refusal:
    """Any error as one that can be sent; an unexpected one is logged, and its details are not sent."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, RequestValidationError | ValidationError):
        return Refusal(422, " ".join(describe_problem(e) for e in error.errors()[:5]), HINTS[422])
    if isinstance(error, HTTPException):
        headers = dict(error.headers or {})
        return Refusal(error.status_code, str(error.detail), HINTS.get(error.status_code, HINTS[400]), headers)
    if isinstance(error, BackstoryError):
        return Refusal(422, str(error), "Correct the request, and send it again.")
    log.error("a request failed", exc_info=error)
    return Refusal(500, "internal error.", "The service's log has the details; please report them.")


def failure(error: Refusal) -> dict[str, Any]:
    """What is sent of it."""
    return {"error": {"code": error.code, "message": error.message, "hint": error.hint}}


def describe_problem(error: Mapping[str, Any]) -> str:
    """One validation problem: the field, what it must be, and what came; never the text that was sent, which may be large."""
    path = [str(x)[:LONGEST] for x in error["loc"]]
    where = path[1:] if len(path) > 1 and path[0] in ("query", "body", "path") else path
    name = where[0] if where else ""
    field = ".".join(where) + (f" ({NAMES[name]})" if name in NAMES else "") if where else "the body"
    if error["type"] == "missing":
        return f"{field} is missing."
    if error["type"] == "extra_forbidden":
        return f"{field} is not a field of this request."
    return f"{field} {_describe_rule(error)}, got {_describe_value(error.get('input'))}."


def _describe_value(value: Any) -> str:
    if isinstance(value, str):
        return value if _short_number(value) else _count(value, "character") if value else "an empty text"
    if isinstance(value, list | tuple):
        return f"a list of {_count(value, 'value')}"
    if isinstance(value, bool | int | float) and len(str(value)) <= 20:
        return str(value)
    return "no value" if value is None else "an object" if isinstance(value, Mapping) else "something else"


def _count(value: Sized, unit: str) -> str:
    return f"{len(value):,} {unit}{'' if len(value) == 1 else 's'}"


def _short_number(text: str) -> bool:
    plain = text.strip().lstrip("+-").replace(".", "", 1)
    return len(text) <= 20 and plain.isdecimal() and plain.isascii()


def _describe_rule(error: Mapping[str, Any]) -> str:
    kind = str(error["type"])
    if kind in BOUNDS:
        return BOUNDS[kind].format(**error.get("ctx", {}))
    known = KINDS.get(kind.partition("_")[0])
    return f"is refused ({error.get('msg', 'it has the wrong form')})" if known is None else f"must be {known}"
