"""Queries out of a request's body: JSON, or the fields of a form; two of them for a comparison, with images as files or data URLs.

Fields of a second query end in 2, so that a form, its JSON twin and an address say the same.
"""

import base64
import binascii
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field
from python_multipart.exceptions import FormParserError
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request

from .errors import HINTS, Refusal
from .schemas import LONGEST_NAME, LONGEST_TEXT, MOST_A_PAGE, MOST_HITS, Shape

JSON, FORM, PARTS = "application/json", "application/x-www-form-urlencoded", "multipart/form-data"
PNG = "data:image/png;base64,"
NEED_PNG = "Send the PNG file as the field `image` of a form."
MOST_TOKENS = 50  # occurrences whose tokens are queried at once
FIELDS = ("text", "gradient", "set", "index")
IMAGES = ("image", "image2")
FORMAT = "json or html; overrides the Accept header"
Format = Literal["json", "html"] | None
S = TypeVar("S", bound=Shape)


def _numbers(value: Any) -> Any:
    """A list up to its first entry that is no number: one error says as much as a million, which would take seconds."""
    for i, x in enumerate(value if isinstance(value, list) else ()):
        try:
            float(x)
        except (TypeError, ValueError):
            return value[: i + 1]
    return value


Name = Annotated[str, Field(max_length=LONGEST_NAME)]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)] | None
Image = Annotated[str, Field(max_length=1 << 24, description=f"a PNG: {PNG}…, or a file of a form")] | None
Label = Annotated[str, Field(max_length=100)] | None
Gradient = Annotated[list[float], BeforeValidator(_numbers), Field(min_length=1, max_length=1_000_000)]
Step = Annotated[int, Field(ge=0, le=10**9)]
At = Annotated[int | None, Field(ge=1, le=10**9, description="a checkpoint's step; without it, the final one")]
Top = Annotated[int, Field(ge=1, le=MOST_HITS, description="results per side")]
Bound = Annotated[float, Field(allow_inf_nan=False, description="limit for the sample's value; needs queries")] | None


class Choice(Shape):
    """Of which model the result is, and how much of it is shown."""

    at: At = None
    top: Top = 10
    replay: bool = False


class QueryBody(Choice):
    """A query: exactly one of `text`, `gradient`, or `set` with `index`."""

    text: Text = None
    gradient: Gradient | None = None
    set: Name | None = None
    index: Step | None = None


class TokensBody(QueryBody):
    """A query of single tokens: the query itself, and occurrences of samples, one step for each."""

    sample: Annotated[list[Name], Field(min_length=1, max_length=MOST_TOKENS)]
    step: Annotated[list[Step], Field(min_length=1, max_length=MOST_TOKENS)]


class Upload(Choice):
    """What comes with an image."""

    label: Label = None


class Pair(Shape):
    """Two queries, each exactly one of `text`, `image` (with `label`), `gradient`, or `set` with `index`."""

    text: Text = None
    image: Image = None
    label: Label = None
    gradient: Gradient | None = None
    set: Name | None = None
    index: Step | None = None
    text2: Text = None
    image2: Image = None
    label2: Label = None
    gradient2: Gradient | None = None
    set2: Name | None = None
    index2: Step | None = None
    at: At = None
    top: Top = 10


class SampleFilter(BaseModel):
    """Which samples to list, in which order, and which page of them."""

    text: Annotated[str | None, Field(max_length=LONGEST_TEXT, description="part of the text or the id")] = None
    source: Name | None = None
    label: Name | None = None
    first_step: Step | None = None
    last_step: Step | None = None
    sort: Annotated[Literal["id", "step", "value"], Field(description="value: most negative first")] = "id"
    queries: Name | None = None
    min_value: Bound = None
    max_value: Bound = None
    page: Annotated[int, Field(ge=1, le=10**7)] = 1
    per: Annotated[int, Field(ge=1, le=MOST_A_PAGE)] = 50
    format: Annotated[Format, Field(description=FORMAT)] = None


def document(shape: type[Shape], files: tuple[str, ...] = ()) -> dict[str, Any]:
    """The body of a path for the OpenAPI document; `files` are fields of a form that may be files."""
    schema = shape.model_json_schema()
    kinds = {JSON: {"schema": schema}, FORM: {"schema": schema}}
    return {"requestBody": {"required": True, "content": kinds | (_document_files(schema, files) if files else {})}}


def document_upload() -> dict[str, Any]:
    """The same for an image with its fields, which comes as a file only."""
    schema = {**Upload.model_json_schema(), "required": ["image"]}
    return {"requestBody": {"required": True, "content": _document_files(schema, ("image",))}}


def _document_files(schema: dict[str, Any], files: tuple[str, ...]) -> dict[str, Any]:
    binary = {name: {"type": "string", "format": "binary"} for name in files}
    return {PARTS: {"schema": {**schema, "properties": {**schema["properties"], **binary}}}}


async def read(request: Request, shape: type[S]) -> S:
    """The body as a shape: JSON, or the fields of a form, of which empty ones are left out."""
    kind = _kind(request)
    if kind == JSON:
        return shape.model_validate(_json(await request.body()))
    if kind == FORM:
        many = {k for k, field in shape.model_fields.items() if "list" in str(field.annotation)}
        async with request.form() as form:
            fields = {k: form.getlist(k) if k in many else _lines(form[k]) for k in form if form[k] != ""}
        request.state.sent = {k: v for k, v in fields.items() if isinstance(v, str)}  # for the page of an error
        return shape.model_validate(fields)
    raise Refusal(415, f"the body must be {JSON} or {FORM}.", "Set the header Content-Type.")


async def read_upload(request: Request) -> tuple[bytes, Upload]:
    """`(bytes of the image, what came with it)`."""
    if _kind(request) != PARTS:
        raise Refusal(415, f"the body must be {PARTS}.", NEED_PNG)
    async with _parts(request, max_files=1, max_fields=10) as form:
        fields = {k: v for k, v in form.items() if k != "image" and v != ""}
        request.state.sent = {k: v for k, v in fields.items() if isinstance(v, str)}
        file = form.get("image")
        if not isinstance(file, UploadFile):
            raise Refusal(422, "there is no file in the field `image`.", NEED_PNG)
        return await file.read(), Upload.model_validate(fields)


async def read_pair(request: Request) -> Pair:
    """The two queries of a request."""
    if _kind(request) != PARTS:
        return await read(request, Pair)
    async with _parts(request, max_files=2, max_fields=20) as form:
        fields = {k: await _field(v) for k, v in form.items()}
    request.state.images = [k for k in IMAGES if fields.get(k) not in (None, "", PNG)]
    request.state.sent = {k: v for k, v in fields.items() if v != "" and k not in IMAGES}  # for the page of an error
    return Pair.model_validate({k: v for k, v in fields.items() if v not in ("", PNG)})


def side(pair: Pair, end: str) -> tuple[dict[str, Any], bytes | None, str | None]:
    """`(fields of a query, bytes of an image, its label)`: the first query ends in "", the second in "2"."""
    given = {name: getattr(pair, name + end) for name in FIELDS}
    image: str | None = getattr(pair, f"image{end}")
    if image is not None and any(x is not None for x in given.values()):
        raise Refusal(422, "one of the two queries has an image and another query.", "Send exactly two queries.")
    return given, None if image is None else _bytes(image), getattr(pair, f"label{end}")


@asynccontextmanager
async def _parts(request: Request, **limits: int) -> AsyncIterator[FormData]:
    """The parts of a form; a broken one is refused, whichever Starlette and parser are installed."""
    try:
        async with request.form(**limits) as form:
            yield form
    except FormParserError as error:
        raise Refusal(400, f"the form cannot be read: {error}.", NEED_PNG) from error


async def _field(value: UploadFile | str) -> str:
    lines: str = _lines(value) if isinstance(value, str) else PNG + base64.b64encode(await value.read()).decode()
    return lines


def _lines(value: Any) -> Any:
    """A field of a form with the line ends that were typed: browsers send two characters for each."""
    return value.replace("\r\n", "\n") if isinstance(value, str) else value


def _kind(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        raise Refusal(400, "the body is not JSON.", HINTS[400]) from None


def _bytes(url: str) -> bytes:
    try:
        if url.startswith(PNG):
            return base64.b64decode(url.removeprefix(PNG), validate=True)
    except binascii.Error:
        pass
    raise Refusal(422, f"an image must be a file, or start with {PNG}.", "Send the bytes of a PNG file in base64.")
