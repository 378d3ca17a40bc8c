"""Every path over HTTP: kind requests are answered, hostile ones refused, in one shape."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.web.conftest import BASE
from tests.web.recipes import RECIPE, TEXTS, assert_same_hits

from backstory.web.app import make_app
from backstory.web.jobs import QUERY, QUICK, SWEEP, Work
from backstory.web.state import State


def refused(client: TestClient, path: str, code: int) -> dict[str, object]:
    actual = client.get(path)
    assert actual.status_code == code, f"{path} gave {actual.status_code}: {actual.text[:200]}"
    error: dict[str, object] = actual.json()["error"]
    assert set(error) == {"code", "message", "hint"}
    assert error["code"] == code
    return error


@pytest.mark.parametrize(
    "path", ["/", "/timeline?queries=poems&at=16", "/health", "/samples?text=court", "/sources?queries=law&queries=poems", "/harmful?top=3", "/openapi.json"]
)  # fmt: skip
def test_paths_answer_in_json(client: TestClient, path: str) -> None:
    actual = client.get(path)
    assert actual.status_code == 200, actual.text
    assert actual.headers["content-type"] == "application/json"
    assert "nosniff" in actual.headers["x-content-type-options"]


def test_samples_are_bounded_by_value(client: TestClient) -> None:
    whole = client.get("/samples?queries=law").json()["items"]
    actual = client.get("/samples?queries=law&min_value=0").json()
    assert [x["id"] for x in actual["items"]] == [x["id"] for x in whole if x["value"] >= 0]
    assert 0 < actual["total"] < len(whole)


def test_the_path_of_every_sample_leads_to_it(state: State) -> None:
    async def main() -> None:  # not by TestClient, which unquotes a path twice
        carrier = httpx.ASGITransport(make_app(state, warm=False))
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
        "/harmful?top=1000000000", "/harmful?top=-1", "/harmful?top=nan", "/timeline?at=7", "/timeline?at=99999999999999999999",
        "/sources?by=text", "/samples?format=xml", f"/samples?source={'a' * 1001}", f"/samples/{'a' * 1001}", "/samples/tags?overwriting=perhaps",
    ],
)  # fmt: skip
def test_what_is_out_of_bounds_is_refused(client: TestClient, path: str) -> None:
    refused(client, path, 422)


def test_the_last_steps_are_left_out_of_harmful_data(client: TestClient) -> None:
    actual = client.get("/harmful?without_last=10").json()
    assert actual["without_last"] == 10
    assert actual["harmful"] != client.get("/harmful").json()["harmful"]
    assert "between 0 and 23" in str(refused(client, "/harmful?without_last=24", 422)["message"])
    refused(client, "/harmful?without_last=-1", 422)


def test_empty_fields_of_a_form_mean_nothing(client: TestClient) -> None:
    actual = client.get("/samples?text=&source=&label=&first_step=&last_step=&sort=&queries=&page=&per=")
    assert actual.status_code == 200
    assert actual.json()["total"] == len(TEXTS)


def test_letters_with_a_meaning_elsewhere_are_letters_here(client: TestClient) -> None:
    for text in ("' OR 1=1 --", "%", "_", "\\", "(", "*", "[a", "\x00"):
        actual = client.get("/samples", params={"text": text})
        assert actual.status_code == 200, text
        assert actual.json()["total"] <= 1, text


def test_json_keeps_script_as_text(client: TestClient) -> None:
    actual = client.get("/samples/tags")
    assert actual.headers["content-type"] == "application/json"
    assert actual.json()["sample"]["text"] == "<script>alert"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/samples", "/samples/tags", "/sources", "/health"])
def test_nothing_can_be_changed(client: TestClient, method: str, path: str) -> None:
    actual = client.request(method, path)
    assert actual.status_code == 405
    assert "read-only" in actual.json()["error"]["hint"]


def test_a_path_that_is_not_there(client: TestClient) -> None:
    assert "/openapi.json" in str(refused(client, "/nothing", 404)["hint"])
    refused(client, "/docs", 404)


def test_the_table_of_sources(client: TestClient) -> None:
    actual = client.get("/sources.csv?queries=law&queries=poems")
    assert actual.headers["content-type"].startswith("text/csv")
    assert actual.text.startswith("source,samples,")
    assert actual.text.splitlines()[0].endswith(",law,poems")


def test_sweeps_and_questions_keep_out_of_the_way_of_look_ups(bare_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, do = list[tuple[str, bool]](), Work.do

    async def noted(self: Work, job: Any, *, lane: str = QUICK, keeps: bool = True, **more: Any) -> Any:
        lanes.append((lane, keeps))
        return await do(self, job, lane=lane, keeps=keeps, **more)

    monkeypatch.setattr(Work, "do", noted)
    with TestClient(make_app(State(bare_run, RECIPE), warm=False), base_url=BASE) as client:
        life, expected = "/samples/tags", {"/": SWEEP, "/ ": QUICK, "/samples": QUICK, "/samples?sort=value": QUICK}
        expected |= {
            "/harmful?queries=poems": QUICK,
            life: SWEEP,
            f"{life}?overwriting=false": QUICK,
            f"{life}?queries=poems": SWEEP,
        }
        for path in expected:
            assert client.get(path.strip()).status_code == 200
        assert lanes == [(lane, True) for lane in expected.values()]
        lanes.clear()
        assert client.post("/query", json={"text": "the court"}).status_code == 200
        assert client.get("/queries/law/0").status_code == 200
        assert lanes == [(SWEEP, False), (SWEEP, True)]
    lanes.clear()
    with TestClient(make_app(State(bare_run), warm=False), base_url=BASE) as client:
        assert [client.get("/").status_code for _ in range(2)] == [200, 200]
        assert [lane for lane, _ in lanes] == [SWEEP, QUICK]  # the report on the run is a sweep too


def test_questions_to_a_model_in_memory_have_their_own_lane(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, do = list[str](), Work.do

    async def noted(self: Work, job: Any, *, lane: str = QUICK, **more: Any) -> Any:
        lanes.append(lane)
        return await do(self, job, lane=lane, **more)

    monkeypatch.setattr(Work, "do", noted)
    with TestClient(make_app(state, warm=False), base_url=BASE) as client:
        assert client.post("/query", json={"text": "the court"}).status_code == 200
        assert client.post("/query", json={"text": "the court", "replay": True}).status_code == 200
    assert lanes == [QUERY, SWEEP]


def test_files_of_the_pages_come_from_a_table(client: TestClient) -> None:
    for name, kind in (("style.css", "text/css"), ("page.js", "text/javascript"), ("plotly.min.js", "text/javascript")):
        actual = client.get(f"/static/{name}")
        assert actual.status_code == 200
        assert actual.headers["content-type"].startswith(kind)
        assert "max-age" in actual.headers["cache-control"]


TEXT = {"text": "the court"}


def refuses(actual: Any, code: int) -> None:
    assert actual.status_code == code, actual.text[:300]
    assert set(actual.json()["error"]) == {"code", "message", "hint"}


def test_typed_text_as_json_and_as_a_form(client: TestClient) -> None:
    plain = client.post("/query", json={**TEXT, "top": 2})
    form = client.post("/query", data={"text": "the court", "top": "2", "at": ""})
    assert plain.status_code == form.status_code == 200
    assert_same_hits(form.json()["hits"], plain.json()["hits"])
    assert len(plain.json()["hits"]) == len(plain.json()["harmful"]) == 2
    page = client.post("/query", data={"text": "the court"}, headers={"accept": "text/html"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"


def test_stored_queries_and_two_of_them(client: TestClient) -> None:
    path = client.get("/query").json()["query_sets"][0]["items"][1]["path"]
    actual = client.get(path, params={"at": 16, "top": 1, "replay": "true"}).json()
    assert (actual["at"], len(actual["hits"]), len(actual["rankings"])) == (16, 1, 3)
    assert [len(client.get(path, params={"top": k}).json()["harmful"]) for k in (1, 3, 200)] == [1, 3, 9]
    again = client.post("/query", json={"set": "law", "index": 1, "at": 16, "top": 1, "replay": True}).json()
    assert again["rankings"] == actual["rankings"]
    both = client.get("/compare?set=law&index=0&set2=poems&index2=1").json()
    assert both["left"]["input"]["set"] == "law"
    assert both["right"]["input"]["index"] == 1


def test_a_number_leads_to_its_query(client: TestClient) -> None:
    actual = client.get("/queries?set=law&index=1", follow_redirects=False)
    assert (actual.status_code, actual.headers["location"]) == (303, "/queries/law/1")
    refuses(client.get("/queries?set=law&index=2"), 404)
    refuses(client.get("/queries?set=https:%2F%2Felsewhere&index=0"), 404)
    refuses(client.get("/query?mistakes=true"), 422)


def test_queries_of_any_kind_are_compared(client: TestClient) -> None:
    text = client.post("/query", json={"text": "the court", "top": 2}).json()
    image = client.post(
        "/query/image", files={"image": ("a.png", b"bytes")}, data={"top": "2", "label": "seven"}
    ).json()
    typed = client.post("/compare", json={"text": "the court", "text2": "red roses", "top": 2})
    assert typed.status_code == 200, typed.text
    assert_same_hits(typed.json()["left"]["hits"], text["hits"])
    assert typed.json()["right"]["input"]["text"] == "red roses"
    again = client.post("/compare", data={"text": "the court", "text2": "red roses", "top": "2"}).json()
    assert_same_hits(again["right"]["hits"], typed.json()["right"]["hits"])
    fields = {"text": "the court", "label2": "seven", "top": "2"}
    mixed = client.post("/compare", files={"image2": ("a.png", b"bytes")}, data=fields).json()
    assert_same_hits(mixed["left"]["hits"], text["hits"])
    assert_same_hits(mixed["right"] | {"seconds": 0.0}, image | {"seconds": 0.0})
    stored = {"image": image["input"]["image"], "label": "seven", "set2": "law", "index2": 0, "top": 2}
    by_url = client.post("/compare", json=stored).json()
    assert_same_hits(by_url["left"]["hits"], image["hits"])
    assert_same_hits(by_url["right"] | {"seconds": 0.0}, client.get("/queries/law/0?top=2").json() | {"seconds": 0.0})


@pytest.mark.parametrize(
    "body", [{}, {"text": "a"}, {"text": "a", "set": "law", "text2": "b"}, {"text": "ab", "image2": "x"}]
)
def test_what_is_no_pair_of_queries_is_refused(body: dict[str, str], client: TestClient) -> None:
    refuses(client.post("/compare", json=body), 422)


def test_lines_typed_in_a_browser_are_those_of_a_program(client: TestClient) -> None:
    """Browsers send two characters for each line end."""
    program = client.post("/query", json={"text": "the court\nheld that", "top": 2}).json()
    browser = client.post("/query", data={"text": "the court\r\nheld that", "top": "2"}).json()
    assert_same_hits(browser | {"seconds": 0.0}, program | {"seconds": 0.0})
    parts = {"text": (None, "the court\r\nheld that"), "text2": (None, "a\r\nb"), "top": (None, "2")}
    both = client.post("/compare", files=parts).json()
    assert_same_hits(both["left"]["hits"], program["hits"])
    assert both["right"]["input"]["text"] == "a\nb"


def test_one_error_is_said_of_a_gradient_however_many_there_are(client: TestClient) -> None:
    actual = client.post("/query", json={"gradient": [1.0, 2.0, *[""] * 1000]})
    refuses(actual, 422)
    said = actual.json()["error"]["message"]
    assert said.count("gradient.") == 1
    assert "gradient.2 " in said


def test_images_of_a_pair_that_is_refused_can_be_given_again(client: TestClient) -> None:
    parts: dict[str, tuple[str | None, bytes]] = {
        "image": ("a.png", b"bytes"), "label": (None, b"seven"), "text2": (None, b"one\ntwo"), "top": (None, b"0"),
    }  # fmt: skip
    page = client.post("/compare", files=parts, headers={"accept": "text/html"}).text
    assert 'type="file" name="image"' in page
    assert 'enctype="multipart/form-data"' in page
    assert 'name="text2">one\ntwo</textarea>' in page


def test_a_pair_that_is_refused_is_kept_in_the_page(client: TestClient) -> None:
    parts = {"text": (None, "the court"), "text2": (None, "red <b>roses</b>"), "top": (None, "0")}
    page = client.post("/compare", files=parts, headers={"accept": "text/html"})
    assert page.status_code == 422
    assert "the court" in page.text
    assert "red &lt;b&gt;roses&lt;/b&gt;" in page.text


def test_an_image_is_uploaded(client: TestClient) -> None:
    actual = client.post("/query/image", files={"image": ("a.png", b"bytes")}, data={"top": "2", "label": "seven"})
    assert actual.status_code == 200, actual.text
    assert actual.json()["input"]["label"] == "seven"
    refuses(client.post("/query/image", data={"top": "2"}), 415)
    refuses(client.post("/query/image", files={"picture": ("a.png", b"bytes")}), 422)
    refuses(client.post("/query/image", files={"image": ("a.png", b"bytes")}, data={"top": "0"}), 422)
    refuses(client.post("/query/image", files={"image": ("a.png", b"x" * (1 << 20))}), 413)


def test_tokens(client: TestClient) -> None:
    step = client.get("/samples/tags").json()["sample"]["steps"][0]
    actual = client.get("/query/tokens", params={"sample": "tags", "step": step, "set": "law", "index": 0})
    assert "".join(p["text"] for p in actual.json()["items"][0]["tokens"]) == "<script>aler"
    body = {"sample": ["tags"], "step": [step], "text": "the court"}
    assert client.post("/query/tokens", json=body).status_code == 200
    page = client.get("/query/tokens", params={"sample": "tags", "step": step, "text": "a b", "format": "html"})
    assert "<script>aler" not in page.text
    refuses(client.post("/query/tokens", json={**body, "step": [step, 1]}), 422)
    refuses(client.get("/query/tokens", params={"sample": "nobody", "step": 0, "text": "a b"}), 404)
    refuses(client.get("/query/tokens", params={"sample": "tags", "step": 10**6, "text": "a b"}), 422)
    refuses(client.get("/query/tokens", params={"sample": ["tags"] * 51, "step": [step] * 51, "text": "a b"}), 422)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400), (b"{", 400), (b"[" * 50_000, 400), (b"\xff", 400), (b"{}", 422), (b"[]", 422), (b'{"text": ""}', 422),
        (b'{"text": "a"}', 422), (b'{"text": "ab", "top": 1000000000}', 422), (b'{"text": "ab", "at": 5}', 422),
        (b'{"text": "\\ud800"}', 422), (b'{"gradient": [NaN]}', 422), (b'{"gradient": [1e999, 1]}', 422),
        (b'{"gradient": [1, 2, 3]}', 422), (b'{"gradient": "x"}', 422), (b'{"set": "../law", "index": 0}', 404),
        (b'{"set": "law", "index": 2}', 404), (b'{"set": "law", "index": -1}', 422), (b'{"text": "ab", "path": "/etc"}', 422),
    ],
)  # fmt: skip
def test_malformed_queries(client: TestClient, body: bytes, code: int) -> None:
    refuses(client.post("/query", content=body, headers={"content-type": "application/json"}), code)


def test_a_gradient_that_is_not_finite(client: TestClient) -> None:
    for bad in ("NaN", "Infinity", "-1e400", "1e39", "null", '"1"'):
        body = '{"gradient": [' + ", ".join(["0"] * 135 + [bad]) + "]}"
        actual = client.post("/query", content=body, headers={"content-type": "application/json"})
        if bad == '"1"':
            assert actual.status_code == 200  # a number in quotes is one
        else:
            refuses(actual, 422)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "multipart/form-data", "multipart/form-data; boundary=x", ""]
)
def test_other_kinds_of_bodies(client: TestClient, kind: str) -> None:
    refuses(client.post("/query", content=b'{"text": "ab"}', headers={"content-type": kind}), 415)


def test_a_broken_form(client: TestClient) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "multipart/form-data; boundary="):
        actual = client.post("/query/image", content=b"--y\r\nnonsense", headers={"content-type": kind})
        assert 400 <= actual.status_code < 500, kind
        assert set(actual.json()["error"]) == {"code", "message", "hint"}


def test_a_body_in_chunks_is_counted(client: TestClient) -> None:
    refuses(client.post("/query", content=(b"x" * 100_000 for _ in range(20))), 413)


def test_a_text_of_one_letter_says_what_is_needed(client: TestClient) -> None:
    actual = client.post("/query", json={"text": "a"})
    assert "must have 2 or more tokens" in actual.json()["error"]["message"]
