"""Pages from results filled by hand: everything is escaped, signs are in words, and nothing leads outside."""

import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest
from tests.web import examples

from backstory.results.influence import Hit
from backstory.results.quality import Agreement, FirstOrder, Quality
from backstory.results.sign import HELPED, HURT
from backstory.web import pages, schemas
from backstory.web.pages import count, marked, plain, render, share, shortened, signed, when
from backstory.web.views import View

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
    actual = Reader()
    actual.feed(html)
    actual.close()
    assert not actual.open, f"left open: {actual.open}"
    return actual


def page(name: str, view: View | None = None, **place: Any) -> str:
    made = examples.PAGES[name]() if view is None else view
    return render(name.split()[0], made, prefix={**examples.PLACE, "path": f"/{name}", **place})


@pytest.mark.parametrize("name", examples.PAGES)
def test_examples_have_the_documented_shapes(name: str) -> None:
    getattr(schemas, examples.SHAPES[name.split()[0]]).model_validate(examples.PAGES[name]().data)


@pytest.fixture(params=examples.PAGES)
def named(request: pytest.FixtureRequest) -> tuple[str, Reader]:
    return request.param, read(page(request.param))


def test_what_users_can_fill_is_only_text(named: tuple[str, Reader]) -> None:
    name, actual = named
    assert "x" not in [a.get("src") for a in actual.all("img")], f"an image of {name} came out of a text"
    assert all(a.get("type") == "application/json" or a.get("src") == "/static/page.js" for a in actual.all("script"))
    assert not [a for _, a in actual.elements if any(k.startswith("on") for k in a)], "inline handlers"
    assert not actual.all("b"), "the run's name is markup"


def test_the_hostile_text_is_shown_as_it_is() -> None:
    for name in ("overview", "samples", "sample", "sources", "harmful", "query", "result", "compare", "error"):
        assert examples.HOSTILE in read(page(name)).text, name


def test_data_blocks_are_json_that_cannot_end_early(named: tuple[str, Reader]) -> None:
    raw = page(named[0])
    blocks = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', raw, flags=re.S)
    assert all("<" not in text for _, text in blocks)
    assert all(set(json.loads(text)) >= {"data", "layout"} for _, text in blocks)
    ids = [a["data-figure"] for _, a in named[1].elements if "data-figure" in a]
    assert ids == [name for name, _ in blocks]


def test_every_page_has_landmarks_one_heading_and_a_way_past_the_head(named: tuple[str, Reader]) -> None:
    actual = named[1]
    assert all(len(actual.all(tag)) == 1 for tag in ("main", "h1", "title"))
    assert actual.all("nav")
    assert actual.all("a")[0] == {"class": "skip", "href": "#main"}
    assert actual.all("html")[0]["lang"] == "en"


def test_fields_have_labels_and_images_words(named: tuple[str, Reader]) -> None:
    actual = named[1]
    labelled = {a.get("for") for a in actual.all("label")}
    ids = [a.get("id") for _, a in actual.elements if a.get("id")]
    assert len(ids) == len(set(ids)), "an id is there twice"
    for tag in ("input", "select", "textarea"):
        for a in actual.all(tag):
            inside = a.get("type") == "checkbox"  # inside its label, or with words of its own
            assert a.get("type") == "hidden" or inside or a.get("id") in labelled, f"{tag} {a} has no label"
    assert all(a.get("alt") for a in actual.all("img"))


def test_nothing_leads_outside(named: tuple[str, Reader]) -> None:
    for tag, a in named[1].elements:
        for key in ("href", "src", "action"):
            if (value := a.get(key)) is not None:
                assert value.startswith(("/", "#", "data:image/")), f"<{tag} {key}={value}>"
                assert not value.startswith("//")


def test_signs_are_in_words_on_every_hit() -> None:
    text = read(page("result")).text
    assert text.count(HELPED) == 3
    assert text.count(HURT) == 3
    assert "+0.05" in text
    assert "−0.03" in text
    assert "nats of the query's loss" in text


@pytest.mark.parametrize("name", ["timeline", "overview"])
@pytest.mark.parametrize("present", [True, False])
def test_the_pattern_over_time_is_one_sentence_with_advice_only_from_phases(name: str, present: bool) -> None:
    pattern, when = examples.phases(present), examples.timeline(present)
    views = {"timeline": when, "overview": examples.overview(when=when)}
    shown = read(page(name, views[name])).text
    assert pattern.words in shown
    assert ("Where influence is high" in shown) == (present and name != "overview")
    assert ("Coloured bands" in shown) == present
    assert "chance" not in shown


def test_words_in_common_are_marked_and_line_breaks_stay() -> None:
    html = page("result")
    assert html.count("<mark>court</mark> <mark>held</mark>") == 6
    assert "sample 0\nkeeps its <mark>line</mark> breaks" in html


def test_marks_are_escaped_too() -> None:
    assert marked("a <body> & cave", "BODY Cave") == "a &lt;<mark>body</mark>&gt; &amp; <mark>cave</mark>"
    assert marked("Straße", "strasse") == "<mark>Straße</mark>"
    assert marked("<", None) == "&lt;"


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
    html = page("sources", examples.sources(("2", "3", "other"), by="label"))
    assert ">label 2</a>" in html


def test_the_model_s_prediction_and_loss_are_shown() -> None:
    known = {
        "image": examples.picture(),
        "model_image": examples.picture(),
        "prediction": "7",
        "loss": 104.26,
        "tokens": 12,
    }
    html = page("result", examples.result(input=examples.shown_input(kind="image", **known)))
    assert "The model predicts label 7" in html
    assert "Loss: 104 over 12 tokens" in html
    assert html.count("data-input") == 1
    assert "as the model gets it" in html
    assert "The model predicts" not in page("result")


def test_a_list_that_is_cut_says_so() -> None:
    many = [{"name": "law", "count": 1000}]
    assert "Queries that it helped (of the first 200 of 1,000)" in page("sample", query_sets=many)
    assert "of the first" not in page("sample")


def test_without_neighbours_the_command_that_gives_them_names_the_run() -> None:
    view = examples.PAGES["sample"]()
    html = page("sample", View({**view.data, "neighbours": None}, view.figures), embed="backstory embed 'my <run>'")
    assert "need embeddings in memory: backstory embed 'my <run>'." in words_of(read(html).text)


def test_the_form_says_how_long_a_text_may_be() -> None:
    assert "At most 20,000 characters, and 64 times the model's context" in page("query").replace("&#39;", "'")


def test_mistakes_are_listed_alone() -> None:
    wrong = {
        "index": 4,
        "label": "test 4: label 2",
        "text": None,
        "image": examples.picture(),
        "path": "/queries/test/4",
    }
    some = {"name": "test", "count": 90, "fits": 60, "items": [{**wrong, "prediction": "7", "mistake": True}]}
    html = page("query", examples.form(query_sets=[some], can_predict=True, mistakes=True))
    assert "60 of 90 queries" in html
    assert "<strong>the model predicts 7</strong>" in html
    assert "These are the first 1 of 60." in html
    assert '<a href="/query">Show all</a>' in html
    assert "/query?mistakes=true" in page("query", examples.form(can_predict=True))
    assert "mistakes" not in page("query")


def test_small_filters() -> None:
    assert count(1234567) == "1,234,567"
    assert when("2025-11-16T09:05:00+00:00") == "16 November 2025, 09:05 UTC"
    assert when("yesterday") == "yesterday"
    assert shortened("x" * 10, 4) == "xxx…"
    assert shortened("xxxx", 4) == "xxxx"
    assert (share(-1.0, 4.0), share(5.0, 4.0), share(1.0, 0.0)) == ("0.250", "1.000", "0")


def test_a_checkpoint_can_be_chosen_without_a_script() -> None:
    actual = read(page("result"))
    form = next(a for a in actual.all("form") if "data-query" in a)
    assert (form["method"], form["action"]) == ("get", "/queries/law/0")
    steps = [a["value"] for a in actual.all("option") if (a.get("value") or "").isdigit()]
    assert steps == ["40", "80", "120"]


def test_a_typed_text_is_sent_again_by_post() -> None:
    typed = examples.result(input=examples.shown_input(kind="text", text=examples.HOSTILE))
    actual = read(page("result", typed))
    form = next(a for a in actual.all("form") if "data-query" in a)
    assert (form["method"], form["action"]) == ("post", "/query")
    texts = [a["value"] for a in actual.all("input") if a.get("name") == "text"]
    assert texts == [examples.HOSTILE] * 6  # the slider, the ranking at every checkpoint, the tokens; three comparisons
    assert "This page as JSON" not in read(page("result", typed, path="/query")).text


def test_tokens_can_be_shaded_where_the_service_can() -> None:
    actual = read(page("result"))
    form = next(a for a in actual.all("form") if "data-shade" in a)
    assert (form["method"], form["action"]) == ("get", "/query/tokens")
    pairs = [(a["name"], a["value"]) for a in actual.all("input") if a.get("name") in ("sample", "step")]
    assert pairs[:2] == [("sample", "law/0"), ("step", "40")]
    assert "data-shade" not in page("result", can_shade=False)


def test_tokens_are_shaded_by_sign_and_size() -> None:
    html = page("tokens")
    assert '<span class="helped" style="--share: 0.500" title="+0.01 helped">The </span>' in html
    assert '<span class="hurt" style="--share: 1.000" title="−0.02 hurt">&lt;script&gt;</span>' in html
    assert "<span> court</span>" in html


def test_pages_of_samples_keep_the_filters() -> None:
    actual = read(page("samples", params={"source": "law", "text": "a&b", "sort": "value", "page": "2"}))
    links = {a["rel"]: a["href"] for a in actual.all("a") if a.get("rel")}
    assert links["prev"] == "/samples?source=law&text=a%26b&sort=value&page=1"
    assert links["next"] == "/samples?source=law&text=a%26b&sort=value&page=3"
    assert next(a for a in actual.all("input") if a.get("id") == "text")["value"] == "a&b"


def test_values_have_a_column_where_a_query_set_is_named() -> None:
    assert "not known" in read(page("samples")).text
    plain = read(page("samples", examples.samples(queries=None))).text
    assert "not known" not in plain
    assert "Sample" in plain


def test_no_sample_is_said_in_words() -> None:
    text = read(page("samples", examples.samples(total=0, page=1, items=[]))).text
    assert "0 samples" in text
    assert "No sample matches" in text


def test_what_overwrote_a_sample_is_computed_by_a_link() -> None:
    actual = read(page("sample", params={"queries": "law"}))
    link = next(a for a in actual.all("a") if a.get("data-replace") == "overwriting")
    assert link["href"] == "/samples/law%2F1?queries=law&overwriting=true"
    for name in ("sample overwritten", "overwriting"):
        text = read(page(name)).text
        assert "overwritten by later samples" in text
        assert "took influence away, most at step 60" in text
    nobody = examples.overwriting(nobody=True)
    for name, view in (("sample", examples.one_sample(nobody)), ("overwriting", nobody)):
        assert "Nothing overwrote its influence." in read(page(name, view)).text


def test_a_sample_s_page_has_the_caveats_of_what_overwrote_it() -> None:
    """Those that its other results have are not said twice."""
    over = examples.overwriting()
    assert over.data["caveats"] == ["a caveat"]
    over.data["caveats"].append("shares need not add up")
    text = read(page("sample", examples.one_sample(over))).text
    assert "Caveats of what overwrote it" in text
    assert (text.count("shares need not add up"), text.count("a caveat")) == (1, 1)
    assert "Caveats of what overwrote it" not in read(page("sample", examples.one_sample(examples.overwriting()))).text


def test_sources_come_as_csv_for_the_same_query_sets() -> None:
    actual = read(page("sources"))
    link = next(a for a in actual.all("a") if "download" in a)
    assert link["href"] == "/sources.csv?queries=law&queries=poems&by=source"
    ticked = [a["value"] for a in actual.all("input") if a.get("name") == "queries" and "checked" in a]
    assert ticked == ["law", "poems"]


def test_harmful_samples_can_be_ticked() -> None:
    actual = read(page("harmful"))
    ticks = [(a["value"], a["data-influence"]) for a in actual.all("input") if a.get("name") == "id"]
    assert ticks[:2] == [("law/0", "-0.02"), ("law/1", "-0.01")]
    assert read(page("harmful", examples.harmful(0))).text.count("No sample hurt") == 1


def test_harmful_samples_say_when_they_were_last_used() -> None:
    html = page("harmful", examples.harmful(without_last=5, last=106))
    assert "2 of these 4 samples were last used in the last tenth" in html
    assert "Uses from step 115 on are left out" in html
    html = page("harmful", examples.harmful(without_last=20))
    assert "because it came last" not in html
    assert "Uses in the last tenth of training (from step 108), which weigh most, are left out." in html
    assert '<td class="number" data-name="Last used">41</td>' in page("harmful")
    assert 'name="without_last" type="number" min="0" max="119" value="20"' in html


def test_a_side_with_samples_of_the_other_sign_says_so() -> None:
    html = page("result", examples.result(harmful=[Hit("law/0", 3, -0.1).as_dict(), Hit("law/1", 4, 0.2).as_dict()]))
    assert "fewer samples hurt than are listed" in html
    assert "Without these the loss would be lower." not in html
    assert "Without these the loss would be higher." in html


def test_a_comparison_says_what_it_is_about_and_how_reliable_it_is() -> None:
    html = page("compare")
    assert html.count("On the model at step") == 2
    assert html.count('class="badge') == 2


def words_of(text: str) -> str:
    return " ".join(text.replace("`", "").split())  # a page shows as code what stands between backticks


RESULTS = ("overview", "result", "sources", "harmful", "timeline", "evolution", "overwriting", "sample", "tokens")


def told(name: str, quality: Quality) -> str:
    """The page of a result of this quality."""
    view = examples.PAGES[name]()
    inner = {"sample": lambda data: data["occurrences"], "tokens": lambda data: data["items"][0]}
    inner.get(name, lambda data: data)(view.data)["quality"] = quality.as_dict()
    return page(name, view)


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_says_how_well_it_ranks_with_a_strip_of_the_tenths(name: str) -> None:
    html = told(name, examples.QUALITY)
    assert words_of(read(html).text).count(words_of(examples.QUALITY.sentence)) == 1
    assert 'data-measured="yes"' in html
    assert '<span class="badge">Quality</span>' in html
    strip = html[html.index('<ol class="strip"') :].partition("</ol>")[0]
    cells = re.findall(r'<li class="(.*?)" title="(.*?)">(.*?)</li>', strip)
    assert [words for *_, words in cells] == [
        "−0.05",
        "0.31",
        "0.52",
        "0.64",
        "0.71",
        "0.78",
        "–",
        "0.83",
        "0.90",
        "0.97",
    ]
    assert [kind for kind, *_ in cells] == ["weak"] * 2 + [""] * 8
    assert [title for _, title, _ in cells][1:3] == ["steps 12 to 23: not reliable", "steps 24 to 35"]
    assert "Outlined: below 0.50, not reliable." in html


def test_the_strip_shows_the_worse_of_both_correlations() -> None:
    limits = tuple(Agreement(40 * k, 40 * k + 40, x, x, x, 8) for k, x in enumerate((0.4, 0.6, 0.85)))
    html = told("timeline", examples.quality(retrained=limits, first_order=FirstOrder(0.5, 0.4, 0.6, 24, 24)))
    cells = re.findall(r"<li class=.*?>(.*?)</li>", html[html.index('<ol class="strip"') :].partition("</ol>")[0])
    assert cells == ["−0.05", "0.31", "0.40", "0.53", "0.60", "0.60", "–", "0.83", "0.85", "0.85"]


@pytest.mark.parametrize("name", RESULTS)
def test_what_was_not_measured_says_how_to_measure_it_and_for_how_long(name: str) -> None:
    html = told(name, examples.UNMEASURED)
    text = words_of(read(html).text)
    assert "Quality: not measured. To measure how reliable the ranking is:" in text
    assert f"backstory calibrate RUN --queries {examples.HOSTILE} (about 2 hours)." in text
    assert 'data-measured="no"' in html
    assert 'class="badge' not in html
    assert 'class="strip"' not in html


@pytest.mark.parametrize("name", RESULTS)
def test_exact_values_say_so_and_have_no_strip(name: str) -> None:
    html = told(name, examples.EXACT)
    assert '<span class="badge exact">Exact</span>' in html
    assert words_of(examples.EXACT.sentence) in words_of(read(html).text)
    assert 'class="strip"' not in html


@pytest.mark.parametrize("name", RESULTS)
def test_what_the_recording_is_like_is_told_beside_its_quality(name: str) -> None:
    text = words_of(read(page(name)).text)
    assert all(words_of(line) in text for line in examples.RECORDING.words)


@pytest.mark.parametrize("name", ["result", "compare"])
def test_a_query_says_once_how_much_of_its_weight_is_ranked(name: str) -> None:
    html = page(name)
    assert html.count(examples.WEIGHT) == (2 if name == "compare" else 1)  # one for each query
    assert html.count("<p data-weight>") == html.count(examples.WEIGHT)


def captions(html: str) -> list[str]:
    return [words_of(read(x).text) for x in re.findall(r"<figcaption>.*?</figcaption>", html, flags=re.S)]


def test_captions_say_where_sizes_over_time_are_corrected() -> None:
    words = f"Sizes over time are rescaled to match exact results on {words_of(examples.QUALITY.on)}."
    assert words in captions(told("result", examples.QUALITY))[0]
    for other in (examples.EXACT, examples.UNMEASURED, examples.quality(factors=())):
        assert "corrected" not in captions(told("result", other))[0]
    assert words in captions(page("compare"))[0]
    caveat = words[0].lower() + words[1:-1]
    for name in ("timeline", "overview", "evolution"):
        assert "corrected" not in captions(page(name))[0]
        view = examples.PAGES[name]()
        (view.data["timeline"] if name == "overview" else view.data)["caveats"].append(caveat)
        assert words in captions(page(name, view))[0], name


def test_the_key_of_a_figure_names_both_looks_of_the_strip() -> None:
    html = page("result")
    key = html[html.index('<ul class="key">') :].partition("</ul>")[0]
    assert re.findall(r'<i class="(full|open)"', key) == ["full", "open"]
    assert "strip: quality, a rank correlation" in key
    assert "outlined, grey above: below 0.50, not reliable" in key


def test_a_source_whose_interval_includes_zero_neither_helps_nor_hurts() -> None:
    html = page("sources")
    table = html[html.index("<tbody>") : html.index("</tbody>")]
    assert table.count(">not clear<") == 2
    assert table.count(">helps<") == 1
    assert "hurt-ink" not in table
    cells = html[html.index("<caption>Rows") :]
    assert cells.count(">not clear<") == 3
    assert cells.count("hurt-ink") == 1


def test_samples_in_both_results_are_marked() -> None:
    text = read(page("compare")).text
    assert "1 sample is in both results" in text
    assert text.count("in both results") == 3


def test_a_page_has_its_twin() -> None:
    actual = read(page("sources", path="/sources", params={"queries": ["law", "poems"]}))
    twin = next(a["href"] for a in actual.all("a") if "format=json" in (a["href"] or ""))
    assert twin == "/sources?queries=law&queries=poems&format=json"


def test_two_queries_that_were_sent_have_no_twin() -> None:
    def twins(**place: Any) -> list[str | None]:
        actual = read(page("compare", path="/compare", **place))
        return [a["href"] for a in actual.all("a") if "format=json" in (a["href"] or "")]

    assert twins(params={}) == []
    chosen = {"set": "law", "index": "0", "set2": "poems", "index2": "0"}
    assert twins(params=chosen) == ["/compare?set=law&index=0&set2=poems&index2=0&format=json"]


@pytest.mark.parametrize(
    ("kind", "sent"), [("stored", {"set", "index"}), ("text", {"text"}), ("image", {"image", "label"})]
)
def test_a_result_can_be_compared_whatever_was_queried(kind: str, sent: set[str]) -> None:
    more: dict[str, dict[str, Any]] = {"stored": {"set": "law", "index": 0}, "image": {"image": examples.picture()}}
    shown = examples.shown_input(kind=kind, text="a text", label="seven", **more.get(kind, {}))
    actual = read(page("result", examples.result(input=shown)))
    hidden = [a["name"] for a in actual.all("input") if a.get("type") == "hidden"]
    assert all(hidden.count(name) >= 3 for name in sent | {"at"})
    assert {"text2", "image2", "set2"} <= {
        a.get("name") for tag, a in actual.elements if tag in ("input", "textarea", "select")
    }


def test_images_are_shown_with_words() -> None:
    shown = examples.sample(1, text=None, image="/images/law%2F1")
    view = examples.one_sample()
    actual = read(page("sample", View({**view.data, "sample": shown}, view.figures)))
    image = next(a for a in actual.all("img") if a["src"] == "/images/law%2F1")
    assert image["alt"] == "Training image law/1, labelled label 1"


def test_static_files_are_a_fixed_table() -> None:
    actual = pages.static()
    assert set(actual) == {"style.css", "page.js", "plotly.min.js"}
    assert b"light-dark(" in actual["style.css"][1]
    assert len(actual["plotly.min.js"][1]) > 1_000_000
    assert all(
        b"http://" not in body and b"https://" not in body for n, (_, body) in actual.items() if n != "plotly.min.js"
    )
