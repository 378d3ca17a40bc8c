"""Queries out of JSON and forms, alone and in pairs, with images; anything else is a clear refusal."""

import asyncio
import base64

import pytest
from pydantic import ValidationError
from starlette.requests import Request
from starlette.types import Message

from backstory.web.errors import Refusal
from backstory.web.requests import (
    FORM,
    IMAGES,
    JSON,
    PARTS,
    PNG,
    Pair,
    QueryBody,
    TokensBody,
    document,
    read,
    read_pair,
    read_upload,
    side,
)
from backstory.web.schemas import LONGEST_TEXT, MOST_HITS

URL = PNG + base64.b64encode(b"bytes of an image").decode()


def request(body: bytes, kind: str | None) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [] if kind is None else [(b"content-type", kind.encode())]
    return Request(
        {"type": "http", "method": "POST", "headers": headers, "query_string": b"", "path": "/query"}, receive
    )


def parse(body: bytes, kind: str | None = JSON) -> QueryBody:
    return asyncio.run(read(request(body, kind), QueryBody))


def test_json_and_forms_say_the_same() -> None:
    plain = parse(b'{"text": "a b", "top": 3}', "Application/JSON; charset=utf-8")
    assert plain == parse(b"text=a+b&top=3&at=&set=", FORM) == QueryBody(text="a b", top=3)


def test_lists_of_a_form() -> None:
    actual = asyncio.run(read(request(b"sample=a&step=1&sample=b&step=2&text=x", FORM), TokensBody))
    assert (actual.sample, actual.step) == (["a", "b"], [1, 2])


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"top": ' + b"9" * 5000 + b"}"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    with pytest.raises(Refusal, match="not JSON") as error:
        parse(body)
    assert error.value.code == 400


@pytest.mark.parametrize("kind", [None, "text/plain", "application/xml", "application/jsonx", "multipart/form-data"])
def test_another_kind_of_body_is_refused(kind: str | None) -> None:
    with pytest.raises(Refusal) as error:
        parse(b'{"text": "a"}', kind)
    assert error.value.code == 415


@pytest.mark.parametrize(
    "body", [b"[]", b"3", b"null", b'{"text": ["a"]}', b'{"gradient": [NaN]}', b'{"gradient": [1e999]}']
)
def test_json_of_another_shape_is_refused(body: bytes) -> None:
    with pytest.raises(ValidationError):
        parse(body)


def test_a_text_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ValidationError):
        parse(b'{"text": "\\ud800"}')


def test_an_upload_has_a_file_and_fields() -> None:
    edge = b"--x\r\nContent-Disposition: form-data; name="
    file = edge + b'"image"; filename="a.png"\r\n\r\nbytes\r\n'
    body = file + edge + b'"top"\r\n\r\n4\r\n' + edge + b'"label"\r\n\r\n\r\n--x--\r\n'
    data, fields = asyncio.run(read_upload(request(body, "multipart/form-data; boundary=x")))
    assert (data, fields.top, fields.label) == (b"bytes", 4, None)
    with pytest.raises(Refusal, match="no file"):
        asyncio.run(read_upload(request(edge + b'"image"\r\n\r\ntext\r\n--x--\r\n', "multipart/form-data; boundary=x")))
    with pytest.raises(Refusal) as error:
        asyncio.run(read_upload(request(b"x", JSON)))
    assert error.value.code == 415


def test_bodies_are_documented() -> None:
    actual = document(QueryBody)["requestBody"]["content"]
    assert set(actual) == {JSON, FORM}
    assert "gradient" in actual[JSON]["schema"]["properties"]


def paired(body: bytes, kind: str = JSON) -> Pair:
    return asyncio.run(read_pair(request(body, kind)))


def multipart(fields: dict[str, str], files: dict[str, bytes]) -> Request:
    lines = [f'--x\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items()]
    for name, data in files.items():
        head = f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="a.png"\r\n\r\n'
        lines.append(head.encode() + data + b"\r\n")
    return request(b"".join(lines) + b"--x--\r\n", f"{PARTS}; boundary=x")


def test_json_and_forms_of_a_pair_say_the_same() -> None:
    expected = Pair(text="a b", set2="law", index2=1, top=3)
    assert paired(b'{"text": "a b", "set2": "law", "index2": 1, "top": 3}') == expected
    assert paired(b"text=a+b&set2=law&index2=1&top=3&text2=&at=", FORM) == expected
    fields = {"text": "a b", "set2": "law", "index2": "1", "top": "3", "text2": ""}
    assert asyncio.run(read_pair(multipart(fields, {"image": b""}))) == expected


def test_images_are_files_or_data_urls() -> None:
    form = asyncio.run(read_pair(multipart({"image": URL, "label2": "7"}, {"image2": b"bytes of an image"})))
    assert form == Pair(image=URL, image2=URL, label2="7")
    assert side(form, "")[1:] == (b"bytes of an image", None)
    assert side(form, "2")[1:] == (b"bytes of an image", "7")
    assert side(Pair(text="a", set2="law", index2=3), "2") == (
        {"text": None, "gradient": None, "set": "law", "index": 3}, None, None,
    )  # fmt: skip


@pytest.mark.parametrize("url", ["/etc/passwd", "data:text/html;base64,AAAA", f"{PNG}not base64!", f"{PNG}A"])
def test_what_is_no_image_is_refused(url: str) -> None:
    with pytest.raises(Refusal, match="an image must be a file") as error:
        side(Pair(image=url), "")
    assert error.value.code == 422


def test_an_image_beside_another_question_is_refused() -> None:
    with pytest.raises(Refusal, match="has an image and another query"):
        side(Pair(image2=URL, text2="a"), "2")


def test_unknown_fields_are_refused_and_the_body_is_documented() -> None:
    with pytest.raises(ValidationError):
        paired(b'{"text3": "a"}')
    kinds = document(Pair, IMAGES)["requestBody"]["content"]
    assert set(kinds) == {JSON, FORM, PARTS}
    assert kinds[PARTS]["schema"]["properties"]["image2"]["format"] == "binary"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_none_is_refused(value: float) -> None:
    with pytest.raises(ValidationError):
        QueryBody(gradient=[0.0, value])


@pytest.mark.parametrize(
    "bad", [{"top": 0}, {"top": MOST_HITS + 1}, {"text": ""}, {"text": "a" * (LONGEST_TEXT + 1)}, {"index": -1}, {"at": 0}, {"path": "/etc"}]
)  # fmt: skip
def test_a_query_has_bounds(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        QueryBody.model_validate({"text": "a", **bad})
