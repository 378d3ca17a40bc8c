"""What the fields of forms and questions are called, and what was wrong with one of them, in plain words."""

from collections.abc import Mapping
from typing import Any

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
    "k": "how many samples",
    "mistakes": "only mistakes",
    "replay": "the ranking at every checkpoint",
    "erasers": "what saturated it",
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
    "step": "the steps",
    "format": "the face",
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


def wrong(error: Mapping[str, Any]) -> str:
    """One problem of validation: which field, what was found, what is expected; never the text that was sent."""
    found = [str(x)[:LONGEST] for x in error["loc"]]
    where = found[1:] if len(found) > 1 and found[0] in ("query", "body", "path") else found
    name = where[0] if where else ""
    field = ".".join(where) + (f" ({NAMES[name]})" if name in NAMES else "") if where else "the body"
    if error["type"] == "missing":
        return f"{field}: found nothing; expected a value."
    if error["type"] == "extra_forbidden":
        return f"{field}: found a field that is not known here; expected none of this name."
    return f"{field}: found {_found(error.get('input'))}; expected {_expected(error)}."


def _found(value: Any) -> str:
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


def _expected(error: Mapping[str, Any]) -> str:
    kind = str(error["type"])
    if kind in BOUNDS:
        return BOUNDS[kind].format(**error.get("ctx", {}))
    return KINDS.get(kind.partition("_")[0], str(error.get("msg", "something else")))
