"""The report: one file that needs nothing else, says what it contains, and can be printed."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient
from tests.support.plain import assert_alike
from tests.web import recorded
from tests.web.browsing import FITS, Visitor, chromium
from tests.web.test_pages import Reader, read, words_of

import backstory
from backstory.demo import digits, texts
from backstory.results.sign import HURT
from backstory.run.groups import OTHERS
from backstory.web import report as made
from backstory.web import views
from backstory.web.app import make_app
from backstory.web.pages import plain as written
from backstory.web.pages import static
from backstory.web.queries import parse_stored, show_influence
from backstory.web.state import State

FIGURES = (
    "by_step", "places_hits", "places_harmful", "timeline", "loss", "sources", "matrix", "followed", "harmful", "occurrences",
    "overwriters", "compare",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, State]]:
    folder = tmp_path_factory.mktemp("runs")
    for _ in recorded.without_network():
        text, numbers = recorded.text_run(folder / "text"), recorded.digits_run(folder / "digits")
        backstory.open(numbers).calibrate("demo", digits.RECIPE, singles=1, removals=0)  # the other one is not
        yield {"text": State(text, texts.RECIPE), "digits": State(numbers, digits.RECIPE)}


@pytest.fixture(scope="module")
def pages(runs: dict[str, State], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    out = {}
    for name, state in runs.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(made.render_report(made.gather(state)), encoding="utf-8")
    return out


def ids(hits: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(h["sample"]) for h in hits]


def plain(file: Path) -> Reader:
    """What stands in the page beside style and scripts."""
    text = file.read_text(encoding="utf-8")
    for _, body in static().values():
        assert body.decode() in text
        text = text.replace(body.decode(), "")
    return read(text)


@pytest.mark.parametrize("name", ["text", "digits"])
def test_nothing_leads_outside(name: str, pages: dict[str, Path]) -> None:
    actual = plain(pages[name])
    links = [a[k] for _, a in actual.elements for k in ("href", "src", "action") if a.get(k)]
    assert all(link is not None and link.startswith(("#", "data:image/png;base64,")) for link in links), links
    assert any(a.get("http-equiv") == "Content-Security-Policy" for a in actual.all("meta"))


@pytest.mark.parametrize("name", ["text", "digits"])
def test_it_says_what_it_contains_and_how_reliable_it_is(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    text, data = words_of(plain(pages[name]).text), made.gather(runs[name]).data
    assert "This report contains training data." in text
    assert "The run was made on" in text
    assert text.count(f"− {HURT}") == 1, "the sign is explained once"
    titles = [
        words_of(re.sub(r"<[^>]+>", "", x)) for x in re.findall(r"<h2>(.*?)</h2>", pages[name].read_text("utf-8"))
    ]
    assert titles[:3] == ["One prediction, traced", "The run", "How reliable is this?"]
    listed = (
        words_of(plain(pages[name]).text).partition("How reliable is this?")[2].partition("When did data matter?")[0]
    )
    told = [data["overview"]["quality"]["sentence"], *data["overview"]["recording"]["words"]]
    assert [listed.count(words_of(line)) for line in told] == [1] * len(told)
    assert all(words_of(line) in text for line in data["timeline"]["caveats"])
    assert data["timeline"]["phases"]["words"] in text
    last = data["results"][-1]
    for hit in (data["harmful"]["helpful"][0], data["harmful"]["harmful"][0], last["hits"][0], last["harmful"][0]):
        assert f"sample {hit['sample']}" in text


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_quality_stands_wherever_the_pages_have_it(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    reader, data = plain(pages[name]), made.gather(runs[name]).data
    judged = [x["quality"] for x in (*data["results"], data["overview"], data["sources"], data["harmful"])]
    marks = [a["data-measured"] for _, a in reader.elements if "data-measured" in a]
    assert marks == ["yes" if x["measured"] else "no" for x in judged]
    assert set(marks) == ({"no"} if name == "text" else {"yes", "no"}), "calibrated at the last step only"
    text = words_of(reader.text)
    assert all(words_of(x["sentence"]) in text for x in judged)
    strips = sum(a.get("class") == "strip" for a in reader.all("ol"))
    assert strips == sum(x["measured"] for x in judged)


@pytest.mark.parametrize("name", ["text", "digits"])
def test_figures_over_time_have_a_strip_where_the_run_was_calibrated(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    drawn = made.gather(runs[name]).figures
    with_strip = {k for k, x in drawn.items() if any("label" in shape for shape in x["layout"]["shapes"])}
    assert with_strip == (set() if name == "text" else {"by_step", "timeline"})
    text = words_of(plain(pages[name]).text)
    assert text.count("Sizes over time are rescaled to match") == (0 if name == "text" else 3)  # and of the comparison
    last = made.gather(runs[name]).data["results"][-1]
    assert [text.count(words_of(line)) for line in last["words"]] == ([] if name == "text" else [1])


@pytest.mark.parametrize("name", ["text", "digits"])
def test_harmful_samples_are_shown_with_their_last_use(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    reader, hurt = plain(pages[name]), made.gather(runs[name]).data["harmful"]
    assert hurt["words"][0] in words_of(reader.text)
    raw = pages[name].read_text(encoding="utf-8")
    assert '<th scope="col" class="number">Last used</th>' in raw
    shown = re.findall(r'data-name="Last used">([\d,]+)</td>', raw)
    assert shown == [f"{max(hurt['samples'][x]['steps']):,}" for x in ids(hurt["harmful"])]


@pytest.mark.parametrize("name", ["text", "digits"])
def test_each_checkpoint_has_its_own_loss(name: str, pages: dict[str, Path], runs: dict[str, State]) -> None:
    losses = [written(x["input"]["loss"]) for x in made.gather(runs[name]).data["results"]]
    assert len(set(losses)) > 1
    raw = pages[name].read_text(encoding="utf-8")
    part = raw[raw.index("<h2>One prediction, traced</h2>") :].partition("<h2>The run</h2>")[0]
    card, *moments = part.split("<section data-moment=")
    assert "Loss:" not in card
    assert [re.findall(r"<li>Loss: (.+?)(?: over [\d,]+ tokens)?</li>", x) for x in moments] == [[x] for x in losses]


@pytest.mark.parametrize("name", ["text", "digits"])
def test_without_a_script_a_figure_says_where_its_numbers_are(name: str, pages: dict[str, Path]) -> None:
    raw = pages[name].read_text(encoding="utf-8")
    figures = re.findall(
        r'data-figure="(figure-\w+)"><noscript>(.*?)</noscript></div>\s*<script type="(.*?)" id="(.*?)">', raw
    )
    assert len(figures) == sum("data-figure" in a for _, a in plain(pages[name]).elements) > 0
    for figure, said, kind, after in figures:
        assert said == "Figures need JavaScript; the numbers are in the source of this file, after this place."
        assert (kind, after) == ("application/json", figure)


def test_all_figures_are_in_it(pages: dict[str, Path]) -> None:
    ids = [a["data-figure"] for _, a in plain(pages["text"]).elements if "data-figure" in a]
    assert ids == [f"figure-{name}" for name in FIGURES]
    digits = [a["data-figure"] for _, a in plain(pages["digits"]).elements if "data-figure" in a]
    none = {"matrix"}  # one domain
    assert digits == [f"figure-{name}" for name in FIGURES if name not in none]


def test_sources_are_valued_as_on_the_page(runs: dict[str, State]) -> None:
    for state in runs.values():
        with TestClient(make_app(state, warm=False), base_url="http://127.0.0.1") as client:
            shown = client.get("/sources").json()
        state.stopping.clear()
        assert made.gather(state).data["sources"] == shown


@pytest.mark.parametrize("name", ["text", "digits"])
def test_one_query_at_every_checkpoint(name: str, runs: dict[str, State]) -> None:
    state, data = runs[name], made.gather(runs[name]).data
    assert [x["at"] for x in data["results"]] == state.checkpoints
    query = parse_stored(state, data["queries"], 0)
    for result in data["results"]:
        expected = show_influence(state, query, result["at"], made.BEST).data
        assert ids(result["hits"]) == ids(expected["hits"])
        assert ids(result["harmful"]) == ids(expected["harmful"])
    assert [r["at"] for r in data["results"][-1]["rankings"]] == state.checkpoints


def test_samples_are_followed_and_harmful_ones_are_those_of_the_page(runs: dict[str, State]) -> None:
    state, view = runs["text"], made.gather(runs["text"])
    ranking, followed = view.data["harmful"], view.data["followed"]["mean"]
    assert ids(ranking["harmful"]) == ids(views.harmful(state, None, made.WORST, None).data["harmful"])
    chosen = ids([*ranking["helpful"][: made.FOLLOWED], *ranking["harmful"][: made.FOLLOWED]])
    assert [name for name in followed if name != OTHERS] == chosen
    for name in chosen:
        alone = views.sample(state, name, None, False).data["evolution"]["mean"][name]
        assert_alike(followed[name], alone, rel=1e-5)
    assert len(view.figures["followed"]["data"]) == len(chosen)
    again = views.sample(state, str(ranking["helpful"][0]["sample"]), None, True).data
    assert_alike(view.data["sample"], again, rel=1e-5, abs=1e-7)


def test_hostile_text_is_only_text(pages: dict[str, Path]) -> None:
    raw = pages["text"].read_text(encoding="utf-8")
    assert "<script>document.title" not in raw


def test_pictures_are_in_the_file(pages: dict[str, Path]) -> None:
    actual = [a["src"] for a in plain(pages["digits"]).all("img")]
    assert len(actual) > 12
    assert all(src is not None and src.startswith("data:image/png;base64,") for src in actual)


def test_the_query_set_can_be_chosen(runs: dict[str, State]) -> None:
    path = runs["text"].run.path
    data = made.gather(State(path, texts.RECIPE, queries="poems")).data
    assert (data["timeline"]["queries"], data["results"][-1]["input"]["set"]) == ("poems", "poems")
    assert data["harmful"]["helpful"][0]["influence"] > 0 > data["harmful"]["harmful"][0]["influence"]
    assert data["sources"]["domains"] == ["code", "law", "poems"]  # passages holds the first of each
    state = State(path, texts.RECIPE, queries="poems:1")
    one = made.gather(state).data
    assert (one["timeline"]["queries"], one["compared"]) == ("poems:1", None)
    assert one["sources"]["domains"] == data["sources"]["domains"]
    assert ids(one["results"][-1]["hits"]) == ids(
        show_influence(state, parse_stored(state, "poems", 1), None, made.BEST).data["hits"]
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it_and_asks_nobody(width: int, pages: dict[str, Path]) -> None:
    with chromium() as browser:
        for file in pages.values():
            visitor = Visitor(browser, file.parent.as_uri(), viewport={"width": width, "height": 900})
            page = visitor.see(f"/{file.name}")
            assert page.evaluate(FITS)
            assert page.locator(".canvas .main-svg").count() >= 3
            visitor.close()


def test_keys_lead_nowhere_in_a_file(pages: dict[str, Path]) -> None:
    with chromium() as browser:
        visitor = Visitor(browser, pages["text"].parent.as_uri())
        page, asked = visitor.see("/text.html"), list[str]()
        page.on("request", lambda request: asked.append(request.url))
        for key in "oqsrh/t":
            page.keyboard.press(key)
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()  # the last key has done its work
        page.keyboard.press("t")
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert asked == []
        assert page.url == pages["text"].as_uri()
        visitor.close()


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_slider_works_in_the_file_alone(name: str, pages: dict[str, Path], runs: dict[str, State]) -> None:
    results = made.gather(runs[name]).data["results"]
    with chromium() as browser:
        visitor = Visitor(browser, pages[name].parent.as_uri())
        page = visitor.see(f"/{name}.html")
        slider, seen = page.get_by_label("At checkpoint", exact=True), page.locator("[data-moment]:visible li.hit")

        def agrees(result: Mapping[str, Any]) -> None:
            expect(slider).to_have_attribute("aria-valuetext", re.compile(f"^step {result['at']:,}"))
            assert [x.get_attribute("data-id") for x in seen.all()] == ids([*result["hits"], *result["harmful"]])

        agrees(results[-1])
        slider.press("ArrowLeft")
        agrees(results[-2])
        page.locator("main").click(position={"x": 1, "y": 1})
        page.keyboard.press("[")
        agrees(results[-3])
        page.get_by_role("button", name="Replay").click()
        expect(page.get_by_role("button", name="Replay")).to_have_attribute("aria-pressed", "false")
        agrees(results[-1])
        visitor.close()


def test_without_a_script_every_checkpoint_is_there(pages: dict[str, Path], runs: dict[str, State]) -> None:
    moments = [a["data-moment"] for _, a in plain(pages["text"]).elements if "data-moment" in a]
    steps = [f"step {c:,}" for c in runs["text"].checkpoints]
    assert moments == [*steps[:-1], f"{steps[-1]} (final)"]
