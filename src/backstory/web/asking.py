"""Questions out of a request's body: JSON, or the fields of a form."""

import json
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import Request

from .errors import HINTS, Refused
from .schemas import LONGEST_NAME, MOST_HITS, Question, Shape

JSON, FORM, PARTS = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
MOST_SHADED = 50
S = TypeVar("S", bound=Shape)
Step = Annotated[int, Field(ge=0, le=10**9)]


class Shaded(Question):
    """A question about single tokens: the question itself, and occurrences of samples, one step for each."""

    sample: Annotated[list[Annotated[str, Field(max_length=LONGEST_NAME)]], Field(min_length=1, max_length=MOST_SHADED)]
    step: Annotated[list[Step], Field(min_length=1, max_length=MOST_SHADED)]


class Upload(Shape):
    """What comes with an image."""

    label: Annotated[str, Field(max_length=100)] | None = None
    at: Annotated[int, Field(ge=1, le=10**9)] | None = None
    k: Annotated[int, Field(ge=1, le=MOST_HITS)] = 10
    replay: bool = False


def documented(shape: type[Shape], form: bool = True) -> dict[str, Any]:
    """The body of a path for the OpenAPI document."""
    schema = shape.model_json_schema()
    kinds = {JSON: {"schema": schema}, **({FORM: {"schema": schema}} if form else {})}
    return {"requestBody": {"required": True, "content": kinds}}


def documented_upload() -> dict[str, Any]:
    """The same for an image with its fields."""
    schema = Upload.model_json_schema()
    schema["properties"] = {"image": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["image"]
    return {"requestBody": {"required": True, "content": {PARTS: {"schema": schema}}}}


async def read(request: Request, shape: type[S]) -> S:
    """The body as a shape: JSON, or the fields of a form, of which empty ones are left out."""
    kind = _kind(request)
    if kind == JSON:
        return shape.model_validate(_json(await request.body()))
    if kind == FORM:
        many = {k for k, field in shape.model_fields.items() if "list" in str(field.annotation)}
        async with request.form() as form:
            found = {k: form.getlist(k) if k in many else lines(form[k]) for k in form if form[k] != ""}
        request.state.sent = {k: v for k, v in found.items() if isinstance(v, str)}  # for the page of an error
        return shape.model_validate(found)
    raise Refused(415, f"the body must be {JSON} or {FORM}.", "Set the header Content-Type.")


def lines(value: Any) -> Any:
    """A field of a form with the line ends that were typed: browsers send two characters for each."""
    return value.replace("\r\n", "\n") if isinstance(value, str) else value


async def read_upload(request: Request) -> tuple[bytes, Upload]:
    """`(bytes of the image, what came with it)`."""
    if _kind(request) != PARTS:
        raise Refused(415, f"the body must be {PARTS}.", "Send the PNG file as the field `image` of a form.")
    async with request.form(max_files=1, max_fields=10) as form:
        fields = {k: v for k, v in form.items() if k != "image" and v != ""}
        request.state.sent = {k: v for k, v in fields.items() if isinstance(v, str)}
        file = form.get("image")
        if not isinstance(file, UploadFile):
            raise Refused(
                422, "there is no file in the field `image`.", "Send the PNG file as the field `image` of a form."
            )
        return await file.read(), Upload.model_validate(fields)


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON.", HINTS[400]) from None
