"""Questions over HTTP: kind ones are answered, hostile ones refused, in one shape."""

from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.web.recipes import assert_same_hits

TEXT = {"text": "the court"}


def refused(found: Any, code: int) -> None:
    assert found.status_code == code, found.text[:300]
    assert set(found.json()["error"]) == {"code", "message", "hint"}


def test_typed_text_as_json_and_as_a_form(client: TestClient) -> None:
    plain = client.post("/ask", json={**TEXT, "k": 2})
    form = client.post("/ask", data={"text": "the court", "k": "2", "at": ""})
    assert plain.status_code == form.status_code == 200
    assert_same_hits(form.json()["helpful"], plain.json()["helpful"])
    assert len(plain.json()["helpful"]) == len(plain.json()["harmful"]) == 2
    page = client.post("/ask", data={"text": "the court"}, headers={"accept": "text/html"})
    assert page.headers["content-type"] == "text/html; charset=utf-8"


def test_stored_queries_and_two_of_them(client: TestClient) -> None:
    path = client.get("/ask").json()["query_sets"][0]["items"][1]["path"]
    found = client.get(path, params={"at": 16, "k": 1, "replay": "true"}).json()
    assert (found["at"], len(found["helpful"]), len(found["replay"])) == (16, 1, 3)
    assert [len(client.get(path, params={"k": k}).json()["harmful"]) for k in (1, 3, 200)] == [1, 3, 9]
    again = client.post("/ask", json={"set": "law", "index": 1, "at": 16, "k": 1, "replay": True}).json()
    assert again["replay"] == found["replay"]
    both = client.get("/compare?set=law&index=0&set2=poems&index2=1").json()
    assert both["left"]["query"]["set"] == "law"
    assert both["right"]["query"]["index"] == 1


def test_a_number_leads_to_its_query(client: TestClient) -> None:
    found = client.get("/queries?set=law&index=1", follow_redirects=False)
    assert (found.status_code, found.headers["location"]) == (303, "/queries/law/1")
    refused(client.get("/queries?set=law&index=2"), 404)
    refused(client.get("/queries?set=https:%2F%2Felsewhere&index=0"), 404)
    refused(client.get("/ask?mistakes=true"), 422)


def test_questions_of_any_kind_are_compared(client: TestClient) -> None:
    text = client.post("/ask", json={"text": "the court", "k": 2}).json()
    image = client.post("/ask/image", files={"image": ("a.png", b"bytes")}, data={"k": "2", "label": "seven"}).json()
    typed = client.post("/compare", json={"text": "the court", "text2": "red roses", "k": 2})
    assert typed.status_code == 200, typed.text
    assert_same_hits(typed.json()["left"]["helpful"], text["helpful"])
    assert typed.json()["right"]["query"]["text"] == "red roses"
    again = client.post("/compare", data={"text": "the court", "text2": "red roses", "k": "2"}).json()
    assert_same_hits(again["right"]["helpful"], typed.json()["right"]["helpful"])
    fields = {"text": "the court", "label2": "seven", "k": "2"}
    mixed = client.post("/compare", files={"image2": ("a.png", b"bytes")}, data=fields).json()
    assert_same_hits(mixed["left"]["helpful"], text["helpful"])
    assert_same_hits(mixed["right"] | {"seconds": 0.0}, image | {"seconds": 0.0})
    stored = {"image": image["query"]["image"], "label": "seven", "set2": "law", "index2": 0, "k": 2}
    by_url = client.post("/compare", json=stored).json()
    assert_same_hits(by_url["left"]["helpful"], image["helpful"])
    assert_same_hits(by_url["right"] | {"seconds": 0.0}, client.get("/queries/law/0?k=2").json() | {"seconds": 0.0})


@pytest.mark.parametrize(
    "body", [{}, {"text": "a"}, {"text": "a", "set": "law", "text2": "b"}, {"text": "ab", "image2": "x"}]
)
def test_what_is_no_pair_of_questions_is_refused(body: dict[str, str], client: TestClient) -> None:
    refused(client.post("/compare", json=body), 422)


def test_lines_typed_in_a_browser_are_those_of_a_program(client: TestClient) -> None:
    """Browsers send two characters for each line end."""
    program = client.post("/ask", json={"text": "the court\nheld that", "k": 2}).json()
    browser = client.post("/ask", data={"text": "the court\r\nheld that", "k": "2"}).json()
    assert_same_hits(browser | {"seconds": 0.0}, program | {"seconds": 0.0})
    parts = {"text": (None, "the court\r\nheld that"), "text2": (None, "a\r\nb"), "k": (None, "2")}
    both = client.post("/compare", files=parts).json()
    assert_same_hits(both["left"]["helpful"], program["helpful"])
    assert both["right"]["query"]["text"] == "a\nb"


def test_one_error_is_said_of_a_gradient_however_many_there_are(client: TestClient) -> None:
    found = client.post("/ask", json={"gradient": [1.0, 2.0, *[""] * 1000]})
    refused(found, 422)
    said = found.json()["error"]["message"]
    assert said.count("gradient.") == 1
    assert "gradient.2 " in said


def test_images_of_a_pair_that_is_refused_can_be_given_again(client: TestClient) -> None:
    parts: dict[str, tuple[str | None, bytes]] = {
        "image": ("a.png", b"bytes"), "label": (None, b"seven"), "text2": (None, b"one\ntwo"), "k": (None, b"0"),
    }  # fmt: skip
    page = client.post("/compare", files=parts, headers={"accept": "text/html"}).text
    assert 'type="file" name="image"' in page
    assert 'enctype="multipart/form-data"' in page
    assert 'name="text2">one\ntwo</textarea>' in page


def test_a_pair_that_is_refused_is_kept_in_the_page(client: TestClient) -> None:
    parts = {"text": (None, "the court"), "text2": (None, "red <b>roses</b>"), "k": (None, "0")}
    page = client.post("/compare", files=parts, headers={"accept": "text/html"})
    assert page.status_code == 422
    assert "the court" in page.text
    assert "red &lt;b&gt;roses&lt;/b&gt;" in page.text


def test_an_image_is_uploaded(client: TestClient) -> None:
    found = client.post("/ask/image", files={"image": ("a.png", b"bytes")}, data={"k": "2", "label": "seven"})
    assert found.status_code == 200, found.text
    assert found.json()["query"]["label"] == "seven"
    refused(client.post("/ask/image", data={"k": "2"}), 415)
    refused(client.post("/ask/image", files={"picture": ("a.png", b"bytes")}), 422)
    refused(client.post("/ask/image", files={"image": ("a.png", b"bytes")}, data={"k": "0"}), 422)
    refused(client.post("/ask/image", files={"image": ("a.png", b"x" * (1 << 20))}), 413)


def test_tokens(client: TestClient) -> None:
    step = client.get("/samples/tags").json()["sample"]["steps"][0]
    found = client.get("/ask/tokens", params={"sample": "tags", "step": step, "set": "law", "index": 0})
    assert "".join(p["text"] for p in found.json()["items"][0]["tokens"]) == "<script>aler"
    body = {"sample": ["tags"], "step": [step], "text": "the court"}
    assert client.post("/ask/tokens", json=body).status_code == 200
    page = client.get("/ask/tokens", params={"sample": "tags", "step": step, "text": "a b", "format": "html"})
    assert "<script>aler" not in page.text
    refused(client.post("/ask/tokens", json={**body, "step": [step, 1]}), 422)
    refused(client.get("/ask/tokens", params={"sample": "nobody", "step": 0, "text": "a b"}), 404)
    refused(client.get("/ask/tokens", params={"sample": "tags", "step": 10**6, "text": "a b"}), 422)
    refused(client.get("/ask/tokens", params={"sample": ["tags"] * 51, "step": [step] * 51, "text": "a b"}), 422)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", 400), (b"{", 400), (b"[" * 50_000, 400), (b"\xff", 400), (b"{}", 422), (b"[]", 422), (b'{"text": ""}', 422),
        (b'{"text": "a"}', 422), (b'{"text": "ab", "k": 1000000000}', 422), (b'{"text": "ab", "at": 5}', 422),
        (b'{"text": "\\ud800"}', 422), (b'{"gradient": [NaN]}', 422), (b'{"gradient": [1e999, 1]}', 422),
        (b'{"gradient": [1, 2, 3]}', 422), (b'{"gradient": "x"}', 422), (b'{"set": "../law", "index": 0}', 404),
        (b'{"set": "law", "index": 2}', 404), (b'{"set": "law", "index": -1}', 422), (b'{"text": "ab", "path": "/etc"}', 422),
    ],
)  # fmt: skip
def test_malformed_questions(client: TestClient, body: bytes, code: int) -> None:
    refused(client.post("/ask", content=body, headers={"content-type": "application/json"}), code)


def test_a_gradient_that_is_not_finite(client: TestClient) -> None:
    for bad in ("NaN", "Infinity", "-1e400", "1e39", "null", '"1"'):
        body = '{"gradient": [' + ", ".join(["0"] * 135 + [bad]) + "]}"
        found = client.post("/ask", content=body, headers={"content-type": "application/json"})
        if bad == '"1"':
            assert found.status_code == 200  # a number in quotes is one
        else:
            refused(found, 422)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/xml", "multipart/form-data", "multipart/form-data; boundary=x", ""]
)
def test_other_kinds_of_bodies(client: TestClient, kind: str) -> None:
    refused(client.post("/ask", content=b'{"text": "ab"}', headers={"content-type": kind}), 415)


def test_a_broken_form(client: TestClient) -> None:
    for kind in ("multipart/form-data", "multipart/form-data; boundary=x", "multipart/form-data; boundary="):
        found = client.post("/ask/image", content=b"--y\r\nnonsense", headers={"content-type": kind})
        assert 400 <= found.status_code < 500, kind
        assert set(found.json()["error"]) == {"code", "message", "hint"}


def test_a_body_in_chunks_is_counted(client: TestClient) -> None:
    refused(client.post("/ask", content=(b"x" * 100_000 for _ in range(20))), 413)


def test_a_text_of_one_letter_says_what_is_needed(client: TestClient) -> None:
    found = client.post("/ask", json={"text": "a"})
    assert "expected 2 or more" in found.json()["error"]["message"]
