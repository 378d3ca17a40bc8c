"""The whole service: what its OpenAPI document says holds, it writes nothing, and it stands many clients."""

import asyncio
import hashlib
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from starlette.testclient import TestClient
from tests.web.conftest import BASE
from tests.web.recipes import RECIPE, assert_same_hits, copied

from backstory.web import views
from backstory.web.app import _warm, make_app
from backstory.web.limits import Limits
from backstory.web.state import State

TOKEN = "a-token-of-some-length"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "allow_header_conformance",
)


@pytest.fixture(scope="session")
def document(state: State) -> Any:
    import schemathesis

    return schemathesis.openapi.from_asgi("/openapi.json", make_app(state, limits=Limits(any_host=True), warm=False))


@pytest.mark.parametrize("examples", [1, pytest.param(40, marks=pytest.mark.slow)])  # for each path, kind and unkind
def test_the_document_holds(document: Any, examples: int) -> None:
    """Kind and unkind requests to every path, always the same ones: no 5xx, and what comes back is what is documented."""
    from schemathesis import checks
    from schemathesis.generation import GenerationMode

    held = [getattr(checks, name) for name in CHECKS]
    seen = []
    for actual in document.get_all_operations():
        operation = actual.ok()
        calm = settings(
            max_examples=examples, derandomize=True, database=None, deadline=None, phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )  # fmt: skip
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):

            @calm
            @given(case=operation.as_strategy(generation_mode=mode))
            def hammer(case: Any) -> None:
                case.call_and_validate(checks=held)

            try:
                hammer()
            except Unsatisfiable:  # some paths have nothing that could be wrong
                assert mode == GenerationMode.NEGATIVE, operation.label
        seen.append(operation.label)
    assert len(seen) == 19, seen


def test_every_path_is_documented(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        "/", "/timeline", "/evolution", "/overwriting", "/health", "/samples", "/samples/{id}", "/images/{id}", "/sources",
        "/sources.csv", "/harmful",
        "/query", "/query/image", "/query/tokens", "/queries/{set}/{index}", "/compare",
    }  # fmt: skip
    for path, methods in paths.items():
        for method, facts in methods.items():
            assert {"401", "404", "413", "422", "429", "503"} <= set(facts["responses"]), (method, path)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_the_run_is_never_written(text_run: Path) -> None:
    before = hashes(text_run)
    assert len(before) > 10
    with TestClient(make_app(State(text_run, RECIPE)), base_url=BASE) as client:
        paths: tuple[str, ...] = (
            "/",
            "/timeline",
            "/evolution",
            "/overwriting?sample=tags",
            "/samples?sort=value",
            "/samples/tags?overwriting=true",
            "/sources",
            "/harmful",
            "/query",
        )
        paths += ("/queries/law/0?replay=true", "/compare?set=law&index=0&set2=poems&index2=0", "/images/law%2F1%2F0")
        for path in paths:
            assert client.get(path).status_code == 200, path
        assert client.post("/query", json={"text": "the court"}).status_code == 200
        assert client.post("/query/image", files={"image": ("a.png", b"x")}).status_code == 200
        for method in ("PUT", "DELETE", "PATCH", "POST"):
            client.request(method, "/samples/tags")
    assert hashes(text_run) == before


def test_with_a_token_nothing_is_told_without_it(state: State) -> None:
    app = make_app(state, limits=Limits(token=TOKEN, any_host=True), warm=False)
    client = TestClient(app, base_url="http://elsewhere.example")
    for path in ("/", "/samples", "/openapi.json", "/nothing", "/images/law%2F1%2F0"):
        actual = client.get(path)
        assert actual.status_code == 401, path
        assert actual.json()["error"]["code"] == 401
    assert client.post("/query", json={"text": "the court"}).status_code == 401
    assert client.get("/health").status_code == client.get("/static/page.js").status_code == 200
    assert client.get("/samples", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_the_page_of_a_missing_token_tells_nothing_of_the_run(text_run: Path, tmp_path: Path) -> None:
    state = State(copied(text_run, tmp_path / "hidden-name"), RECIPE)
    app = make_app(state, limits=Limits(token=TOKEN, any_host=True), warm=False)
    client, browser = TestClient(app, base_url=BASE), {"accept": "text/html"}
    assert "hidden-name" in client.get("/nothing", headers={**browser, "authorization": f"Bearer {TOKEN}"}).text
    page = client.get("/", headers=browser)
    assert page.status_code == 401
    assert "hidden-name" not in page.text
    assert "poems" not in page.text


def test_without_a_token_the_host_must_be_this_machine(state: State) -> None:
    assert TestClient(make_app(state, warm=False), base_url="http://evil.example").get("/").status_code == 400


def test_what_fails_inside_is_a_plain_500(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(views, "harmful", fails)
    actual = TestClient(make_app(state, warm=False), base_url=BASE).get("/harmful")
    assert actual.status_code == 500
    assert actual.json()["error"]["message"] == "internal error."
    assert "secret" not in actual.text


def test_a_full_queue_and_slow_answers(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the limit wait; one more is told to come again; whoever waits too long is told so; health answers all the time."""
    go, real = threading.Event(), views.harmful

    def slow(*args: Any) -> Any:
        assert go.wait(20)
        return real(*args)

    monkeypatch.setattr(views, "harmful", slow)

    async def main() -> None:
        carrier = httpx.ASGITransport(make_app(state, warm=False, queue=3, timeout=3))
        async with httpx.AsyncClient(transport=carrier, base_url=BASE, timeout=60) as client:
            waiting = [asyncio.ensure_future(client.get("/harmful")) for _ in range(3)]
            while (await client.get("/health")).json()["busy"] < 3:
                await asyncio.sleep(0.001)
            full = await client.get("/samples")
            assert full.status_code == 429
            assert full.headers["retry-after"] == "1"
            assert full.json()["error"]["code"] == 429
            late = await asyncio.gather(*waiting)
            assert [r.status_code for r in late] == [503] * 3
            assert "retry-after" in late[0].headers
            go.set()
            while (await client.get("/health")).json()["busy"]:
                await asyncio.sleep(0.001)
            assert (await client.get("/harmful")).status_code == 200

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_many_clients_at_once_get_the_same_right_answers(state: State) -> None:
    texts = ["the court", "red roses", "a judge of law"]

    async def main() -> None:
        carrier = httpx.ASGITransport(make_app(state, warm=False, queue=100))
        async with httpx.AsyncClient(transport=carrier, base_url=BASE, timeout=60) as client:
            alone = [(await client.post("/query", json={"text": text})).json()["hits"] for text in texts]
            asked = [client.post("/query", json={"text": texts[n % 3]}) for n in range(48)]
            asked += [client.get("/images/law%2F1%2F0") for _ in range(24)]
            actual = await asyncio.gather(*asked)
            assert {r.status_code for r in actual} == {200}
            for n in range(48):
                assert_same_hits(actual[n].json()["hits"], alone[n % 3])

    asyncio.run(main())


def test_the_service_warms_up_and_ends(text_run: Path) -> None:
    state = State(text_run, RECIPE)
    with TestClient(make_app(state), base_url=BASE) as client:
        assert client.get("/").status_code == 200
        assert not state.stopping.is_set()
    assert state.stopping.is_set()


def test_what_fails_in_the_background_is_logged(
    text_run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise RuntimeError("out of order")

    state = State(text_run, RECIPE)
    monkeypatch.setattr(state, "warm", fails)
    _warm(state)
    assert "not computed in advance" in caplog.text
    assert "out of order" in caplog.text
