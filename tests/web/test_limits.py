"""Who may ask, how much may be sent, and the headers of every answer."""

import asyncio
import base64
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from backstory.web.errors import Refusal
from backstory.web.limits import HEADERS, Guard, Limits, loopback

TOKEN = "0123456789abcdef-token"


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Says how many bytes came, and with which query string."""
    if scope["path"] == "/fails":
        raise RuntimeError("secret")
    body = await Request(scope, receive).body()
    await PlainTextResponse(f"{len(body)} {scope['query_string'].decode()}")(scope, receive, send)


def say(request: Request, error: Refusal) -> Response:
    return PlainTextResponse(error.message, error.code, headers=error.headers)


def asked(
    limits: Limits,
    path: str = "/",
    *,
    method: str = "POST",
    headers: Mapping[str, str] | None = None,
    chunks: Iterable[bytes] = (b"",),
    query: bytes = b"",
    stuck: bool = False,
) -> tuple[int, dict[str, str], str]:
    """`(status, headers, body)` of one request, its body sent in chunks; `stuck`: the last one never comes."""
    parts, sent = list(chunks), list[Message]()
    given = {"host": "127.0.0.1:8321", **(headers or {})}

    async def receive() -> Message:
        if not parts:
            await asyncio.sleep(3600)
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts) or stuck}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http", "method": method, "path": path, "query_string": query, "scheme": "http", "http_version": "1.1",
        "headers": [(k.lower().encode(), v.encode("latin-1")) for k, v in given.items()],
    }  # fmt: skip
    asyncio.run(Guard(echo, limits, say)(scope, receive, send))
    actual = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], actual, b"".join(m.get("body", b"") for m in sent[1:]).decode()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.1", "LOCALHOST.", "a.localhost"])
def test_loopback_names(host: str) -> None:
    assert loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.168.1.2", "example.org", "localhost.example.org", "127.0.0.1.nip.io", ""]
)
def test_names_of_other_machines(host: str) -> None:
    assert not loopback(host)


def test_a_foreign_name_for_this_machine_is_refused_without_a_token() -> None:
    assert asked(Limits())[0] == 200
    for host in ("evil.example:8321", "evil.example", ""):
        assert asked(Limits(), headers={"host": host})[0] == 400, host
    for host in ("localhost", "[::1]:8321", "[::1]", "127.0.0.1"):
        assert asked(Limits(), headers={"host": host})[0] == 200, host
    assert asked(Limits(any_host=True), headers={"host": "evil.example"})[0] == 200


def test_the_token_is_asked_for_everywhere_but_where_nothing_is_told() -> None:
    limits = Limits(token=TOKEN)
    for path in ("/", "/samples", "/openapi.json", "/healthy", "/health/", "/static", "//health", "/samples/../health"):
        assert asked(limits, path)[0] == 401, path
    assert asked(limits, "/health")[0] == asked(limits, "/static/page.js")[0] == 200


def test_the_token_is_taken_as_bearer_and_as_password() -> None:
    limits = Limits(token=TOKEN)
    basic = base64.b64encode(f"anyone:{TOKEN}".encode()).decode()
    for good in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Basic {basic}"):
        assert asked(limits, headers={"authorization": good})[0] == 200, good
    wrong = base64.b64encode(f"{TOKEN}:anyone".encode()).decode()
    for bad in (
        TOKEN,
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        "Bearer",
        "Basic %%%",
        f"Basic {wrong}",
        "Digest x",
        "Bearer é",
    ):
        status, headers, _ = asked(limits, headers={"authorization": bad})
        assert status == 401, bad
        assert headers["www-authenticate"].startswith("Basic")


def test_a_body_is_counted_as_it_comes() -> None:
    limits = Limits(most_bytes=10)
    assert asked(limits, chunks=[b"12345", b"67890"])[::2] == (200, "10 ")
    assert asked(limits, chunks=[b"12345", b"67890", b"1"])[0] == 413
    assert asked(limits, chunks=[b"x" * 11], headers={"content-length": "3"})[0] == 413  # what is said does not count
    assert asked(limits, headers={"content-length": "11"})[0] == 413
    for length in ("9" * 400, "9" * 5000):  # more digits than Python reads as a number
        assert asked(limits, headers={"content-length": length})[0] == 413
    assert asked(limits, headers={"content-length": "\xb2"})[0] == 200  # no number: only what comes counts


def test_a_body_that_does_not_come_ends() -> None:
    status, _, said = asked(Limits(body_seconds=0.05), chunks=[b"1"], stuck=True)
    assert (status, "did not arrive within 0.05 s" in said) == (400, True)


def test_every_answer_has_the_headers() -> None:
    cases = ((Limits(), "/", 200), (Limits(token=TOKEN), "/", 401), (Limits(), "/fails", 500))
    for limits, path, expected in cases:
        status, headers, body = asked(limits, path)
        assert status == expected
        assert {k.lower(): v for k, v in HEADERS.items()}.items() <= headers.items()
        assert headers["cache-control"] == "no-store"
        assert "secret" not in body
    policy = HEADERS["Content-Security-Policy"]
    assert "script-src 'self';" in policy
    assert "default-src 'none'" in policy


@pytest.mark.parametrize(
    "headers",
    [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "https://elsewhere.example"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "null"},
        {"origin": "null", "sec-fetch-site": "cross-site"},
        {"origin": "http://127.0.0.1:8321", "sec-fetch-site": "cross-site"},
    ],
)
def test_what_the_page_of_another_site_sends_is_refused(headers: dict[str, str]) -> None:
    status, _, said = asked(Limits(), "/query", headers=headers)
    assert (status, "another site" in said) == (403, True)
    token = {"authorization": f"Bearer {TOKEN}", **headers}
    assert asked(Limits(token=TOKEN, any_host=True), "/query", headers=token)[0] == 403


@pytest.mark.parametrize(
    "origin",
    [
        *(
            "http://[::1",
            "http://[",
            "http://[::1]:8321]",
            "null",
            "",
            "http://",
            "//",
            "127.0.0.1:8321",
            "http://\xe9\xbd",
        ),
        *("\xe9", "x" * 10**5, "http://" + "x" * 10**5),
    ],
)
def test_an_origin_that_cannot_be_read_is_foreign_whatever_the_token(
    origin: str, caplog: pytest.LogCaptureFixture
) -> None:
    for limits in (Limits(), Limits(token=TOKEN), Limits(token=TOKEN, any_host=True)):
        assert asked(limits, "/query", headers={"origin": origin})[0] == 403
    assert asked(Limits(any_host=True), "/query", headers={"origin": origin, "host": ""})[0] == 403
    assert caplog.records == [], "nothing failed inside"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8321"},
        {"sec-fetch-site": "same-origin", "origin": "null"},
        {"sec-fetch-site": "none"},
        {"origin": "http://127.0.0.1:8321"},
    ],
)
def test_what_our_own_page_or_a_program_sends_is_taken(headers: dict[str, str]) -> None:
    assert asked(Limits(), "/query", headers=headers)[0] == 200


def test_a_link_from_another_site_may_be_followed() -> None:
    assert asked(Limits(), method="GET", headers={"sec-fetch-site": "cross-site"})[0] == 200


def test_empty_fields_of_a_form_are_left_out() -> None:
    assert asked(Limits(), query=b"text=&sort=id&a&b=%20&c==")[2] == "0 sort=id&b=%20&c=="
