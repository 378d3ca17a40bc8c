"""Two questions out of one request, in JSON and in forms, with images."""

import asyncio
import base64

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from tests.web.test_asking import request

from backstory.web.asking import FORM, JSON, PARTS
from backstory.web.comparing import PNG, Pair, documented, read, side
from backstory.web.errors import Refused

URL = PNG + base64.b64encode(b"bytes of an image").decode()


def paired(body: bytes, kind: str = JSON) -> Pair:
    return asyncio.run(read(request(body, kind)))


def multipart(fields: dict[str, str], files: dict[str, bytes]) -> Request:
    lines = [f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    for name, data in files.items():
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
        lines.append(head.encode() + data + b"\r\n")
    return request(b"".join(lines) + b"--x--\r\n", f"{PARTS}; boundary=x")


def test_json_and_forms_say_the_same() -> None:
    expected = Pair(text="a b", set2="law", index2=1, k=3)
    assert paired(b'{"text": "a b", "set2": "law", "index2": 1, "k": 3}') == expected
    assert paired(b"text=a+b&set2=law&index2=1&k=3&text2=&at=", FORM) == expected
    fields = {"text": "a b", "set2": "law", "index2": "1", "k": "3", "text2": ""}
    assert asyncio.run(read(multipart(fields, {"image": b""}))) == expected


def test_images_are_files_or_data_urls() -> None:
    form = asyncio.run(read(multipart({"image": URL, "label2": "7"}, {"image2": b"bytes of an image"})))
    assert form == Pair(image=URL, image2=URL, label2="7")
    assert side(form, "")[1:] == (b"bytes of an image", None)
    assert side(form, "2")[1:] == (b"bytes of an image", "7")
    assert side(Pair(text="a", set2="law", index2=3), "2") == (
        {"text": None, "gradient": None, "set": "law", "index": 3}, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("url", ["/etc/passwd", "data:text/html;base64,AAAA", f"{PNG}not base64!", f"{PNG}A"])
def test_what_is_no_image_is_refused(url: str) -> None:
    with pytest.raises(Refused, match="an image must be a file") as error:
        side(Pair(image=url), "")
    assert error.value.code == 422


def test_an_image_beside_another_question_is_refused() -> None:
    with pytest.raises(Refused, match="an image and another question"):
        side(Pair(image2=URL, text2="a"), "2")


def test_unknown_fields_are_refused_and_the_body_is_documented() -> None:
    with pytest.raises(ValidationError):
        paired(b'{"text3": "a"}')
    kinds = documented()["requestBody"]["content"]
    assert set(kinds) == {JSON, FORM, PARTS}
    assert kinds[PARTS]["schema"]["properties"]["image2"]["format"] == "binary"
