"""Every path that shows the run, asked over HTTP, kindly and not."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.web.conftest import BASE
from tests.web.recipes import RECIPE, TEXTS

from backstory.web.app import make_app
from backstory.web.jobs import ASK, QUICK, SWEEP, Work
from backstory.web.state import Opened


def refused(client: TestClient, path: str, code: int) -> dict[str, object]:
    found = client.get(path)
    assert found.status_code == code, f"{path} gave {found.status_code}: {found.text[:200]}"
    error: dict[str, object] = found.json()["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == code
    return error


@pytest.mark.parametrize(
    "path", ["/", "/timeline?queries=poems&at=16", "/phases", "/health", "/samples?text=court", "/sources?queries=law&queries=poems", "/harmful?k=3", "/openapi.json"]
)  # fmt: skip
def test_paths_answer_in_json(client: TestClient, path: str) -> None:
    found = client.get(path)
    assert found.status_code == 200, found.text
    assert found.headers["content-type"] == "application/json"
    assert "nosniff" in found.headers["x-content-type-options"]


def test_samples_are_bounded_by_value(client: TestClient) -> None:
    whole = client.get("/samples?queries=law").json()["items"]
    found = client.get("/samples?queries=law&min_value=0").json()
    assert [x["id"] for x in found["items"]] == [x["id"] for x in whole if x["value"] >= 0]
    assert 0 < found["total"] < len(whole)


def test_the_path_of_every_sample_leads_to_it(opened: Opened) -> None:
    async def main() -> None:  # not by TestClient, which unquotes a path twice
        carrier = httpx.ASGITransport(make_app(opened, warm=False))
        async with httpx.AsyncClient(transport=carrier, base_url=BASE) as client:
            items = (await client.get("/samples?per=200")).json()["items"]
            assert {shown["id"] for shown in items} == set(TEXTS)
            for shown in items:
                assert (await client.get(shown["path"])).json()["sample"]["id"] == shown["id"]
                image = await client.get(f"/images/{shown['path'].removeprefix('/samples/')}")
                assert image.status_code == (404 if shown["image"] is None else 200)
                assert shown["image"] is None or image.headers["content-type"] == "image/png"

    asyncio.run(main())


@pytest.mark.parametrize(
    "name",
    [
        "../config.json",
        "%2e%2e%2fconfig.json",
        "..%2F..%2F..%2Fetc%2Fhosts",
        "law/1/0%00",
        "law",
        "rows.lance",
        "%ff",
        "a" * 900,
    ],
)
@pytest.mark.parametrize("path", ["/samples/", "/images/", "/static/"])
def test_no_path_reaches_a_file(client: TestClient, path: str, name: str) -> None:
    said = refused(client, path + name, 404)
    assert "config" not in str(said)


@pytest.mark.parametrize(
    "path", ["/queries/..%2F..%2Fconfig/0", "/queries/checkpoint-00000000/0", "/timeline?queries=../law"]
)
def test_no_name_of_a_set_reaches_a_file(client: TestClient, path: str) -> None:
    refused(client, path, 404)


@pytest.mark.parametrize(
    "path",
    [
        "/samples?per=201", "/samples?per=0", "/samples?page=0", "/samples?page=1e3", "/samples?sort=text", "/samples?first_step=-1",
        "/samples?min_value=0", "/samples?max_value=0", "/samples?queries=law&min_value=nan", "/samples?queries=law&max_value=inf",
        "/harmful?k=1000000000", "/harmful?k=-1", "/harmful?k=nan", "/timeline?at=7", "/timeline?at=99999999999999999999",
        "/sources?by=text", "/samples?format=xml", f"/samples?source={'a' * 1001}", f"/samples/{'a' * 1001}", "/samples/tags?erasers=perhaps",
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused(client: TestClient, path: str) -> None:
    refused(client, path, 422)


def test_the_last_steps_are_left_out_of_harmful_data(client: TestClient) -> None:
    found = client.get("/harmful?without_last=10").json()
    assert found["without_last"] == 10
    assert found["items"] != client.get("/harmful").json()["items"]
    assert "expected 0 to 23" in str(refused(client, "/harmful?without_last=24", 422)["message"])
    refused(client, "/harmful?without_last=-1", 422)


def test_empty_fields_of_a_form_mean_nothing(client: TestClient) -> None:
    found = client.get("/samples?text=&source=&label=&first_step=&last_step=&sort=&queries=&page=&per=")
    assert found.status_code == 200
    assert found.json()["total"] == len(TEXTS)


def test_letters_with_a_meaning_elsewhere_are_letters_here(client: TestClient) -> None:
    for text in ("' OR 1=1 --", "%", "_", "\\", "(", "*", "[a", "\x00"):
        found = client.get("/samples", params={"text": text})
        assert found.status_code == 200, text
        assert found.json()["total"] <= 1, text


def test_json_keeps_script_as_text(client: TestClient) -> None:
    found = client.get("/samples/tags")
    assert found.headers["content-type"] == "application/json"
    assert found.json()["sample"]["text"] == "<script>alert"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/samples", "/samples/tags", "/sources", "/health"])
def test_nothing_can_be_changed(client: TestClient, method: str, path: str) -> None:
    found = client.request(method, path)
    assert found.status_code == 405
    assert "read-only" in found.json()["error"]["hint"]


def test_a_path_that_is_not_there(client: TestClient) -> None:
    assert "/openapi.json" in str(refused(client, "/nothing", 404)["hint"])
    refused(client, "/docs", 404)


def test_the_table_of_sources(client: TestClient) -> None:
    found = client.get("/sources.csv?queries=law&queries=poems")
    assert found.headers["content-type"].startswith("text/csv")
    assert found.text.splitlines()[0] == "source,samples,value,low,high,law,poems"


def test_sweeps_and_questions_keep_out_of_the_way_of_look_ups(bare_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, do = list[tuple[str, bool]](), Work.do

    async def noted(self: Work, job: Any, *, lane: str = QUICK, keeps: bool = True, **more: Any) -> Any:
        lanes.append((lane, keeps))
        return await do(self, job, lane=lane, keeps=keeps, **more)

    monkeypatch.setattr(Work, "do", noted)
    with TestClient(make_app(Opened(bare_run, RECIPE), warm=False), base_url=BASE) as client:
        life, expected = "/samples/tags", {"/": SWEEP, "/ ": QUICK, "/samples": QUICK, "/samples?sort=value": SWEEP}
        expected |= {
            "/harmful?queries=poems": QUICK,
            life: SWEEP,
            f"{life}?erasers=false": QUICK,
            f"{life}?queries=poems": SWEEP,
        }
        for path in expected:
            assert client.get(path.strip()).status_code == 200
        assert lanes == [(lane, True) for lane in expected.values()]
        lanes.clear()
        assert client.post("/ask", json={"text": "the court"}).status_code == 200
        assert client.get("/queries/law/0").status_code == 200
        assert lanes == [(SWEEP, False), (SWEEP, True)]
    lanes.clear()
    with TestClient(make_app(Opened(bare_run), warm=False), base_url=BASE) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 200]
        assert [lane for lane, _ in lanes] == [SWEEP, QUICK]  # the report on the run is a sweep too


def test_questions_to_a_model_in_memory_have_their_own_lane(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, do = list[str](), Work.do

    async def noted(self: Work, job: Any, *, lane: str = QUICK, **more: Any) -> Any:
        lanes.append(lane)
        return await do(self, job, lane=lane, **more)

    monkeypatch.setattr(Work, "do", noted)
    with TestClient(make_app(opened, warm=False), base_url=BASE) as client:
        assert client.post("/ask", json={"text": "the court"}).status_code == 200
        assert client.post("/ask", json={"text": "the court", "replay": True}).status_code == 200
    assert lanes == [ASK, SWEEP]


def test_files_of_the_pages_come_from_a_table(client: TestClient) -> None:
    for name, kind in (("style.css", "text/css"), ("page.js", "text/javascript"), ("plotly.min.js", "text/javascript")):
        found = client.get(f"/static/{name}")
        assert found.status_code == 200
        assert found.headers["content-type"].startswith(kind)
        assert "max-age" in found.headers["cache-control"]
