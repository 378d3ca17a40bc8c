"""Pages from shapes filled by hand: everything is escaped, signs are in words, and nothing leads outside."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.web import examples

from backstory.web import pages
from backstory.web import schemas as shapes
from backstory.web.pages import count, marked, plain, render, share, shortened, signed, when

VOID = {"meta", "link", "img", "input", "br"}


class Reader(HTMLParser):
    """What a browser would find: elements with attributes, text, and data blocks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text, self.blocks = "", list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.blocks.append(data)
        else:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag]


def read(html: str) -> Reader:
    found = Reader()
    found.feed(html)
    found.close()
    assert not found.open, f"left open: {found.open}"
    return found


def page(name: str, shape: Any = None, **place: Any) -> str:
    made = examples.PAGES[name]() if shape is None else shape
    return render(name.split()[0], made, prefix={**examples.PLACE, "path": f"/{name}", **place})


@pytest.fixture(params=examples.PAGES)
def named(request: pytest.FixtureRequest) -> tuple[str, Reader]:
    return request.param, read(page(request.param))


def test_what_users_can_fill_is_only_text(named: tuple[str, Reader]) -> None:
    name, found = named
    assert "x" not in [a.get("src") for a in found.all("img")], f"an image of {name} came out of a text"
    assert all(a.get("type") == "application/json" or a.get("src") == "/static/page.js" for a in found.all("script"))
    assert not [a for _, a in found.elements if any(k.startswith("on") for k in a)], "inline handlers"
    assert not found.all("b"), "the run's name is markup"


def test_the_hostile_text_is_shown_as_it_is() -> None:
    for name in ("overview", "samples", "sample", "sources", "harmful", "ask", "answer", "compare", "error"):
        assert examples.HOSTILE in read(page(name)).text, name


def test_data_blocks_are_json_that_cannot_end_early(named: tuple[str, Reader]) -> None:
    raw = page(named[0])
    blocks = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', raw, flags=re.S)
    assert all("<" not in text for _, text in blocks)
    assert all(set(json.loads(text)) >= {"data", "layout"} for _, text in blocks)
    ids = [a["data-figure"] for _, a in named[1].elements if "data-figure" in a]
    assert ids == [name for name, _ in blocks]


def test_every_page_has_landmarks_one_heading_and_a_way_past_the_head(named: tuple[str, Reader]) -> None:
    found = named[1]
    assert all(len(found.all(tag)) == 1 for tag in ("main", "h1", "title"))
    assert found.all("nav")
    assert found.all("a")[0] == {"class": "skip", "href": "#main"}
    assert found.all("html")[0]["lang"] == "en"


def test_fields_have_labels_and_images_words(named: tuple[str, Reader]) -> None:
    found = named[1]
    labelled = {a.get("for") for a in found.all("label")}
    ids = [a.get("id") for _, a in found.elements if a.get("id")]
    assert len(ids) == len(set(ids)), "an id is there twice"
    for tag in ("input", "select", "textarea"):
        for a in found.all(tag):
            inside = a.get("type") == "checkbox"  # inside its label, or with words of its own
            assert a.get("type") == "hidden" or inside or a.get("id") in labelled, f"{tag} {a} has no label"
    assert all(a.get("alt") for a in found.all("img"))


def test_nothing_leads_outside(named: tuple[str, Reader]) -> None:
    for tag, a in named[1].elements:
        for key in ("href", "src", "action"):
            if (value := a.get(key)) is not None:
                assert value.startswith(("/", "#", "data:image/")), f"<{tag} {key}={value}>"
                assert not value.startswith("//")


def test_signs_are_in_words_on_every_hit() -> None:
    text = read(page("answer")).text
    assert text.count(shapes.HELPED) == 3
    assert text.count(shapes.HURT) == 3
    assert "+0.05" in text
    assert "−0.03" in text
    assert "nats of the query's loss" in text


@pytest.mark.parametrize("name", ["timeline", "phases", "overview"])
@pytest.mark.parametrize("present", [True, False])
def test_what_was_found_over_time_is_one_sentence_with_advice_only_from_phases(name: str, present: bool) -> None:
    found = examples.phases(present)
    when = examples.timeline(phases=found)
    shown = read(
        page(name, {"timeline": when, "phases": found, "overview": examples.overview(timeline=when)}[name])
    ).text
    assert found.words in shown
    assert ("Where influence is high" in shown) == (present and name != "overview")
    assert "chance" not in shown


def test_words_in_common_are_marked_and_line_breaks_stay() -> None:
    html = page("answer")
    assert html.count("<mark>court</mark> <mark>held</mark>") == 6
    assert "sample 0\nkeeps its line breaks" in html


def test_marks_are_escaped_too() -> None:
    assert marked("a <b> & c", ["b", "C"]) == "a &lt;<mark>b</mark>&gt; &amp; <mark>c</mark>"
    assert marked("Straße", ["strasse"]) == "<mark>Straße</mark>"
    assert marked("<", []) == "&lt;"


@pytest.mark.parametrize(
    ("x", "shown"),
    [
        (0.0123456, "+0.0123"),
        (-2.0, "−2"),
        (0.0, "+0"),
        (None, "not known"),
        (1.5e-7, "+1.5 × 10⁻⁷"),
        (-3e12, "−3 × 10¹²"),
    ],
)
def test_numbers_have_their_sign(x: float | None, shown: str) -> None:
    assert signed(x) == shown


def test_numbers_without_a_sign_and_labels_with_their_word() -> None:
    assert (plain(104.26), plain(None), plain(-1.5e-7)) == ("104", "not known", "−1.5 × 10⁻⁷")
    html = page(
        "sources",
        examples.sources(by="label", sources=[s.model_copy(update={"name": "2"}) for s in examples.sources().sources]),
    )
    assert ">label 2</a>" in html


def test_the_model_s_own_answer_and_loss_are_said() -> None:
    known: dict[str, Any] = {
        "kind": "image",
        "image": examples.picture(),
        "seen": examples.picture(),
        "says": "7",
        "loss": 104.26,
        "loss_words": "the sum",
    }
    html = page("answer", examples.answer(query=shapes.Query(**known)))
    assert "The model says: label 7" in html
    assert "Its own loss on this: 104 (the sum)" in html
    assert html.count("data-asked") == 1
    assert "as the model sees it" in html
    assert "The model says" not in page("answer")


def test_a_list_that_is_cut_says_so() -> None:
    many = [{"name": "law", "count": 1000}]
    assert "Queries that it helped (of the first 200 of 1,000)" in page("sample", examples.life(), query_sets=many)
    assert "of the first" not in page("sample")


def test_the_form_says_how_long_a_text_may_be() -> None:
    assert "At most 20,000 characters, and 64 times the model's context" in page("ask").replace("&#39;", "'")


def test_mistakes_are_listed_alone() -> None:
    wrong = shapes.Stored(
        index=4, label="test 4: label 2", image=examples.picture(), path="/queries/test/4", says="7", mistake=True
    )
    some = shapes.StoredSet(name="test", count=90, fits=60, items=[wrong])
    html = page("ask", examples.ask(query_sets=[some], can_tell=True, mistakes=True))
    assert "60 of 90 queries" in html
    assert "<strong>the model says 7</strong>" in html
    assert "These are the first 1 of 60." in html
    assert '<a href="/query">Show all</a>' in html
    assert "/query?mistakes=true" in page("ask", examples.ask(can_tell=True))
    assert "mistakes" not in page("ask")


def test_small_filters() -> None:
    assert count(1234567) == "1,234,567"
    assert when("2025-11-16T09:05:00+00:00") == "16 November 2025, 09:05 UTC"
    assert when("yesterday") == "yesterday"
    assert shortened("x" * 10, 4) == "xxx…"
    assert shortened("xxxx", 4) == "xxxx"
    assert (share(-1.0, 4.0), share(5.0, 4.0), share(1.0, 0.0)) == ("0.250", "1.000", "0")


def test_a_checkpoint_can_be_chosen_without_a_script() -> None:
    found = read(page("answer"))
    form = next(a for a in found.all("form") if "data-question" in a)
    assert (form["method"], form["action"]) == ("get", "/queries/law/0")
    steps = [a["value"] for a in found.all("option") if (a.get("value") or "").isdigit()]
    assert steps == ["40", "80", "120"]


def test_a_typed_text_is_asked_again_by_post() -> None:
    typed = examples.answer(query=shapes.Query(kind="text", text=examples.HOSTILE))
    found = read(page("answer", typed))
    form = next(a for a in found.all("form") if "data-question" in a)
    assert (form["method"], form["action"]) == ("post", "/query")
    texts = [a["value"] for a in found.all("input") if a.get("name") == "text"]
    assert texts == [examples.HOSTILE] * 6  # the slider, the ranking at every checkpoint, the tokens; three comparisons
    assert "This page as JSON" not in read(page("answer", typed, path="/query")).text


def test_tokens_can_be_asked_about_where_the_service_can() -> None:
    found = read(page("answer"))
    form = next(a for a in found.all("form") if "data-shade" in a)
    assert (form["method"], form["action"]) == ("get", "/query/tokens")
    asked = [(a["name"], a["value"]) for a in found.all("input") if a.get("name") in ("sample", "step")]
    assert asked[:2] == [("sample", "law/0"), ("step", "40")]
    assert "data-shade" not in page("answer", can_shade=False)


def test_tokens_are_shaded_by_sign_and_size() -> None:
    html = page("tokens")
    assert '<span class="helped" style="--share: 0.500" title="+0.01 helped">The </span>' in html
    assert '<span class="hurt" style="--share: 1.000" title="−0.02 hurt">&lt;script&gt;</span>' in html
    assert "<span> court</span>" in html


def test_pages_of_samples_keep_the_filters() -> None:
    found = read(page("samples", params={"source": "law", "text": "a&b", "sort": "value", "page": "2"}))
    links = {a["rel"]: a["href"] for a in found.all("a") if a.get("rel")}
    assert links["prev"] == "/samples?source=law&text=a%26b&sort=value&page=1"
    assert links["next"] == "/samples?source=law&text=a%26b&sort=value&page=3"
    assert next(a for a in found.all("input") if a.get("id") == "text")["value"] == "a&b"


def test_values_have_a_column_where_a_query_set_is_named() -> None:
    assert "not known" in read(page("samples")).text
    plain = read(page("samples", examples.samples(queries=None))).text
    assert "not known" not in plain
    assert "Sample" in plain


def test_no_sample_is_said_in_words() -> None:
    text = read(page("samples", examples.samples(total=0, page=1, items=[]))).text
    assert "0 samples" in text
    assert "No sample fits" in text


def test_what_saturated_a_sample_is_asked_for_by_a_link() -> None:
    found = read(page("sample", params={"queries": "law"}))
    link = next(a for a in found.all("a") if a.get("data-replace") == "erasers")
    assert link["href"] == "/samples/law%2F1?queries=law&erasers=true"
    text = read(page("sample saturated")).text
    assert "erased by later samples" in text
    assert "took influence away, most at step 60" in text
    alone = examples.saturated().model_copy(update={"erased_by": []})
    assert "Nothing took its influence away." in read(page("sample saturated", alone)).text


def test_sources_come_as_csv_for_the_same_query_sets() -> None:
    found = read(page("sources"))
    link = next(a for a in found.all("a") if "download" in a)
    assert link["href"] == "/sources.csv?queries=law&queries=poems&by=source"
    ticked = [a["value"] for a in found.all("input") if a.get("name") == "queries" and "checked" in a]
    assert ticked == ["law", "poems"]


def test_harmful_samples_can_be_ticked() -> None:
    found = read(page("harmful"))
    ticks = [(a["value"], a["data-influence"]) for a in found.all("input") if a.get("name") == "id"]
    assert ticks[:2] == [("law/0", "-0.02"), ("law/1", "-0.01")]
    assert read(page("harmful", examples.harmful(items=[]))).text.count("No sample hurt") == 1


def test_harmful_samples_say_when_they_were_last_used() -> None:
    html = page("harmful", examples.harmful(late=3, late_from=108, without_last=5))
    assert "3 of these 4 samples were last used in the last tenth" in html
    assert "Uses from step 115 on are left out" in html
    html = page("harmful", examples.harmful(late=0, late_from=108, without_last=20))
    assert "because it came last" not in html
    assert "Uses in the last tenth of training (from step 108), which weigh most, are left out." in html
    assert '<td class="number" data-name="Last used">1</td>' in page("harmful", examples.harmful(at=41))
    assert 'name="without_last" type="number" min="0" max="119" value="20"' in html


def test_a_side_with_samples_of_the_other_sign_says_so() -> None:
    html = page("answer", examples.answer(harmful=[examples.hit(0, -0.1), examples.hit(1, 0.2)]))
    assert "fewer samples hurt than were asked for" in html
    assert "Without these the loss would be lower." not in html
    assert "Without these the loss would be higher." in html


def test_a_comparison_says_what_it_is_about_and_how_far_to_trust_it() -> None:
    html = page("compare")
    assert html.count("On the model at step") == 2
    assert html.count('class="badge') == 2


@pytest.mark.parametrize("name", ["overview", "answer", "sources", "harmful"])
def test_a_badge_says_how_far_to_trust_it_and_why(name: str) -> None:
    known = shapes.Trust(
        verdict="weak", reason="The projection keeps 13%.", early="Early steps are understated.", words=[]
    )
    html = page(name, examples.PAGES[name](quality=known))
    assert 'data-verdict="weak"' in html
    for said in ("Trust: weak", "The projection keeps 13%.", "Early steps are understated."):
        assert said in html


def test_a_source_whose_interval_includes_zero_neither_helps_nor_hurts() -> None:
    html = page("sources", examples.sources(clear=[[True, False], [False, True], [True, False]]))
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    assert table.count(">not clear<") == 2
    assert table.count(">helps<") == 1
    assert "hurt-ink" not in table
    cells = html[html.index("<caption>Rows") :]
    assert cells.count(">not clear<") == 3
    assert cells.count("hurt-ink") == 1


def test_samples_in_both_answers_are_said() -> None:
    text = read(page("compare")).text
    assert "1 sample is in both answers" in text
    assert text.count("in both answers") == 3


def test_a_page_has_its_twin() -> None:
    found = read(page("sources", path="/sources", params={"queries": ["law", "poems"]}))
    twin = next(a["href"] for a in found.all("a") if "format=json" in (a["href"] or ""))
    assert twin == "/sources?queries=law&queries=poems&format=json"


def test_two_questions_that_were_sent_have_no_twin() -> None:
    def twins(**place: Any) -> list[str | None]:
        found = read(page("compare", path="/compare", **place))
        return [a["href"] for a in found.all("a") if "format=json" in (a["href"] or "")]

    assert twins(params={}) == []
    asked = {"set": "law", "index": "0", "set2": "poems", "index2": "0"}
    assert twins(params=asked) == ["/compare?set=law&index=0&set2=poems&index2=0&format=json"]


@pytest.mark.parametrize(
    ("kind", "sent"), [("stored", {"set", "index"}), ("text", {"text"}), ("image", {"image", "label"})]
)
def test_an_answer_can_be_compared_whatever_was_asked(kind: str, sent: set[str]) -> None:
    more: dict[str, dict[str, Any]] = {"stored": {"set": "law", "index": 0}, "image": {"image": examples.picture()}}
    query = shapes.Query(kind=kind, text="a text", label="seven", **more.get(kind, {}))
    found = read(page("answer", examples.answer(query=query)))
    hidden = [a["name"] for a in found.all("input") if a.get("type") == "hidden"]
    assert all(hidden.count(name) >= 3 for name in sent | {"at"})
    assert {"text2", "image2", "set2"} <= {
        a.get("name") for tag, a in found.elements if tag in ("input", "textarea", "select")
    }


def test_images_are_shown_with_words() -> None:
    shown = examples.sample(1, text=None, image="/images/law%2F1")
    found = read(page("sample", examples.life(sample=shown)))
    image = next(a for a in found.all("img") if a["src"] == "/images/law%2F1")
    assert image["alt"] == "Training image law/1, labelled label 1"


def test_static_files_are_a_fixed_table() -> None:
    found = pages.static()
    assert set(found) == {"style.css", "page.js", "plotly.min.js"}
    assert b"light-dark(" in found["style.css"][1]
    assert len(found["plotly.min.js"][1]) > 1_000_000
    assert all(
        b"http://" not in body and b"https://" not in body for n, (_, body) in found.items() if n != "plotly.min.js"
    )
