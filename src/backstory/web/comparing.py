"""Two questions out of one request: JSON, or the fields of a form, with images as files or as data URLs.

Fields of the second question end in 2, so that a form, its JSON twin and an address say the same.
"""

import base64
import binascii
from typing import Annotated, Any

from pydantic import Field
from starlette.datastructures import UploadFile
from starlette.requests import Request

from . import asking
from .errors import Refused
from .schemas import LONGEST_NAME, LONGEST_TEXT, MOST_HITS, Gradient, Shape

PNG = "data:image/png;base64,"
FIELDS = ("text", "gradient", "set", "index")
IMAGES = ("image", "image2")
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TEXT)] | None
Image = Annotated[str, Field(max_length=1 << 24, description=f"a PNG: {PNG}…, or a file of a form")] | None
Label = Annotated[str, Field(max_length=100)] | None
Set = Annotated[str, Field(max_length=LONGEST_NAME)] | None
Index = Annotated[int, Field(ge=0, le=10**9)] | None


class Pair(Shape):
    """Two questions, each exactly one of `text`, `image` (with `label`), `gradient`, or `set` with `index`."""

    text: Text = None
    image: Image = None
    label: Label = None
    gradient: Gradient | None = None
    set: Set = None
    index: Index = None
    text2: Text = None
    image2: Image = None
    label2: Label = None
    gradient2: Gradient | None = None
    set2: Set = None
    index2: Index = None
    at: Annotated[int, Field(ge=1, le=10**9)] | None = Field(default=None, description="a checkpoint; null: final")
    k: Annotated[int, Field(ge=1, le=MOST_HITS)] = 10


def documented() -> dict[str, Any]:
    """The body for the OpenAPI document."""
    out = asking.documented(Pair)
    schema = Pair.model_json_schema()
    files = {name: {"type": "string", "format": "binary"} for name in IMAGES}
    parts = {**schema, "properties": {**schema["properties"], **files}}
    out["requestBody"]["content"][asking.PARTS] = {"schema": parts}
    return out


async def read(request: Request) -> Pair:
    """The two questions of a request."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != asking.PARTS:
        return await asking.read(request, Pair)
    async with request.form(max_files=2, max_fields=20) as form:
        found = {k: await _field(v) for k, v in form.items()}
    request.state.images = [k for k in IMAGES if found.get(k) not in (None, "", PNG)]
    request.state.sent = {k: v for k, v in found.items() if v != "" and k not in IMAGES}  # for the page of an error
    return Pair.model_validate({k: v for k, v in found.items() if v not in ("", PNG)})


async def _field(value: UploadFile | str) -> str:
    return asking.lines(value) if isinstance(value, str) else PNG + base64.b64encode(await value.read()).decode()


def side(pair: Pair, end: str) -> tuple[dict[str, Any], bytes | None, str | None]:
    """`(fields of a question, bytes of an image, its label)`: the first question ends in "", the second in "2"."""
    given = {name: getattr(pair, name + end) for name in FIELDS}
    image: str | None = getattr(pair, f"image{end}")
    if image is not None and any(x is not None for x in given.values()):
        raise Refused(422, "found an image and another question; expected one of them.", "Send two questions in all.")
    return given, None if image is None else _bytes(image), getattr(pair, f"label{end}")


def _bytes(url: str) -> bytes:
    try:
        return base64.b64decode(url.removeprefix(PNG), validate=True) if url.startswith(PNG) else _refused()
    except binascii.Error:
        return _refused()


def _refused() -> bytes:
    raise Refused(422, f"an image must be a file, or start with {PNG}.", "Send the bytes of a PNG file in base64.")
