"""Questions out of JSON and forms; anything else is a clear refusal."""

import asyncio

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Message

from backstory.web.asking import FORM, JSON, Shaded, documented, read, read_upload
from backstory.web.errors import Refused
from backstory.web.schemas import Question


def request(body: bytes, kind: str | None) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [] if kind is None else [(b"content-type", kind.encode())]
    return Request({"type": "http", "method": "POST", "headers": headers, "query_string": b"", "path": "/ask"}, receive)


def asked(body: bytes, kind: str | None = JSON) -> Question:
    return asyncio.run(read(request(body, kind), Question))


def test_json_and_forms_say_the_same() -> None:
    plain = asked(b'{"text": "a b", "k": 3}', "Application/JSON; charset=utf-8")
    assert plain == asked(b"text=a+b&k=3&at=&set=", FORM) == Question(text="a b", k=3)


def test_lists_of_a_form() -> None:
    found = asyncio.run(read(request(b"sample=a&step=1&sample=b&step=2&text=x", FORM), Shaded))
    assert (found.sample, found.step) == (["a", "b"], [1, 2])


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"k": ' + b"9" * 5000 + b"}"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refused, match="not JSON") as error:
        asked(body)
    assert error.value.code == 400


@pytest.mark.parametrize("kind", [None, "text/plain", "application/xml", "application/jsonx", "multipart/form-data"])
def test_another_kind_of_body_is_refused(kind: str | None) -> None:
    with pytest.raises(Refused) as error:
        asked(b'{"text": "a"}', kind)
    assert error.value.code == 415


@pytest.mark.parametrize(
    "body", [b"[]", b"3", b"null", b'{"text": ["a"]}', b'{"gradient": [NaN]}', b'{"gradient": [1e999]}']
)
def test_json_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(ValidationError):
        asked(body)


def test_a_text_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValidationError):
        asked(b'{"text": "\\ud800"}')


def test_an_upload_has_a_file_and_fields() -> None:
    edge = b"--x\r\nContent-Disposition: form-data; name="
    file = edge + b'"image"; filename="a.png"\r\n\r\nbytes\r\n'
    body = file + edge + b'"k"\r\n\r\n4\r\n' + edge + b'"label"\r\n\r\n\r\n--x--\r\n'
    data, fields = asyncio.run(read_upload(request(body, "multipart/form-data; boundary=x")))
    assert (data, fields.k, fields.label) == (b"bytes", 4, None)
    with pytest.raises(Refused, match="no file"):
        asyncio.run(read_upload(request(edge + b'"image"\r\n\r\ntext\r\n--x--\r\n', "multipart/form-data; boundary=x")))
    with pytest.raises(Refused) as error:
        asyncio.run(read_upload(request(b"x", JSON)))
    assert error.value.code == 415


def test_bodies_are_documented() -> None:
    found = documented(Question)["requestBody"]["content"]
    assert set(found) == {JSON, FORM}
    assert "gradient" in found[JSON]["schema"]["properties"]
