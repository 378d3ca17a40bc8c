"""A browser gets a page, a program gets JSON, at the same path."""

import asyncio
import html

import httpx
import pytest
from starlette.requests import Request
from starlette.testclient import TestClient
from tests.web.conftest import BASE

from backstory.web import pages, responses
from backstory.web.app import make_app
from backstory.web.responses import wants_html
from backstory.web.state import State

BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


def request(accept: str | None, query: bytes = b"") -> Request:
    headers = [] if accept is None else [(b"accept", accept.encode("latin-1"))]
    return Request({"type": "http", "headers": headers, "query_string": query, "method": "GET", "path": "/"})


@pytest.mark.parametrize("accept", [BROWSER, "text/html", "TEXT/HTML", "application/json;q=0.5, text/html"])
def test_html_is_preferred(accept: str) -> None:
    assert wants_html(request(accept))
    assert not wants_html(request(accept, b"format=json"))


@pytest.mark.parametrize(
    "accept",
    [
        None,
        "*/*",
        "application/json",
        "text/html;q=0.5,application/json",
        "text/html;q=0",
        "text/html;q=x",
        "text/html;q=\xb2",
        "",
        ",;,",
    ],
)
def test_json_is_preferred(accept: str | None) -> None:
    assert not wants_html(request(accept))
    assert wants_html(request(accept, b"format=html"))


@pytest.mark.parametrize(
    "path", ["/", "/timeline", "/samples", "/query", "/harmful", "/sources", "/samples/tags", "/queries/law/0"]
)
def test_every_page_has_a_twin(client: TestClient, path: str) -> None:
    page = client.get(path, headers={"accept": BROWSER})
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    twin = client.get(f"{path}?format=json", headers={"accept": BROWSER})
    assert (twin.status_code, twin.headers["content-type"]) == (200, "application/json")
    assert twin.json() is not None


def test_an_error_has_two_faces_too(client: TestClient) -> None:
    page = client.get("/samples/nobody", headers={"accept": BROWSER})
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "no sample of this id" in page.text
    assert client.get("/samples/nobody").json()["error"]["code"] == 404


def test_a_weight_that_only_looks_like_a_number_is_none(state: State) -> None:
    async def main() -> None:  # not by TestClient, which encodes headers anew
        carrier = httpx.ASGITransport(make_app(state, warm=False))
        async with httpx.AsyncClient(transport=carrier, base_url=BASE) as client:
            for path, code in (("/health", 200), ("/nothing", 404)):
                actual = await client.get(path, headers=[(b"accept", b"text/html;q=\xb2")])
                assert (actual.status_code, actual.headers["content-type"]) == (code, "application/json")

    asyncio.run(main())


def test_the_page_of_an_error_keeps_what_was_typed(client: TestClient) -> None:
    typed = "\n<b>the court</b>" + "a" * 4000
    page = client.post("/query", data={"text": typed, "top": "3"}, headers={"accept": BROWSER})
    assert page.status_code == 422
    assert "must have at most 4000 characters, got 4,017 characters" in page.text
    assert '<form class="card stack" action="/query" method="post"' in page.text
    assert f'name="text">\n\n{html.escape(typed[1:])}</textarea>' in page.text
    assert 'name="top" type="text" value="3"' in page.text


def test_the_page_of_an_error_keeps_a_search_and_an_upload(client: TestClient) -> None:
    page = client.get("/samples?text=court&page=9&format=html").text
    assert '<form class="card stack" action="/samples" method="get"' in page
    for name, value in (("text", "court"), ("page", "9")):
        assert f'name="{name}" type="text" value="{value}"' in page
    assert 'name="format"' not in page
    sent = client.post("/query/image", data={"label": "seven"}, files={"other": b"x"}, headers={"accept": BROWSER})
    assert sent.status_code == 422
    assert 'enctype="multipart/form-data"' in sent.text
    assert 'type="file" name="image"' in sent.text
    assert 'name="label" type="text" value="seven"' in sent.text


def test_an_error_without_a_form_has_none(client: TestClient) -> None:
    for page in (
        client.get("/nothing", headers={"accept": BROWSER}),
        client.put("/query", headers={"accept": BROWSER}),
    ):
        assert "That did not work" in page.text
        assert "Send again" not in page.text


def test_where_the_page_of_an_error_fails_it_is_json(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> str:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(pages, "render", fails)
    actual = client.get("/samples/nobody", headers={"accept": BROWSER})
    assert (actual.status_code, actual.headers["content-type"]) == (404, "application/json")
    assert set(actual.json()["error"]) == {"code", "message", "hint"}


def test_script_in_a_sample_is_escaped_on_the_page(client: TestClient) -> None:
    page = client.get("/samples/tags", headers={"accept": BROWSER}).text
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_path_of_a_page_is_as_it_was_meant() -> None:
    """Where it is written into a link it is quoted once."""
    scope = {
        "type": "http",
        "method": "GET",
        "path": "/samples/a?b#c",
        "query_string": b"x=1",
        "headers": [],
        "server": ("a", 80),
        "scheme": "http",
    }
    assert responses._where(Request(scope)) == {"path": "/samples/a?b#c", "params": {"x": "1"}}
