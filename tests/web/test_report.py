"""The report: one file that needs nothing else, says what it contains, and can be printed."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from playwright.sync_api import expect
from starlette.testclient import TestClient
from tests.support.plain import assert_alike
from tests.web import recorded
from tests.web.browsing import FITS, Visitor, chromium
from tests.web.test_pages import Reader, read

from backstory.demo import digits, texts
from backstory.web import report as made
from backstory.web import schemas as shapes
from backstory.web import views, views_samples, words
from backstory.web import views_query as views_ask
from backstory.web.app import make_app
from backstory.web.pages import plain as written
from backstory.web.pages import static
from backstory.web.state import State

FIGURES = (
    "timeline", "loss", "sources", "matrix", "followed", "harmful", "occurrences", "erasers", "pace", "replay_helpful", "replay_harmful",
    "compare",
)  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, State]]:
    folder = tmp_path_factory.mktemp("runs")
    for _ in recorded.without_network():
        text, numbers = recorded.text_run(folder / "text"), recorded.digits_run(folder / "digits")
        yield {"text": State(text, texts.RECIPE), "digits": State(numbers, digits.RECIPE)}


@pytest.fixture(scope="module")
def pages(runs: dict[str, State], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    out = {}
    for name, state in runs.items():
        out[name] = folder / f"{name}.html"
        out[name].write_text(made.report(made.gathered(state)), encoding="utf-8")
    return out


def ids(hits: Sequence[shapes.Hit]) -> list[str]:
    return [h.sample.id for h in hits]


def plain(file: Path) -> Reader:
    """What stands in the page beside style and scripts."""
    text = file.read_text(encoding="utf-8")
    for _, body in static().values():
        assert body.decode() in text
        text = text.replace(body.decode(), "")
    return read(text)


@pytest.mark.parametrize("name", ["text", "digits"])
def test_nothing_leads_outside(name: str, pages: dict[str, Path]) -> None:
    found = plain(pages[name])
    links = [a[k] for _, a in found.elements for k in ("href", "src", "action") if a.get(k)]
    assert all(link is not None and link.startswith(("#", "data:image/png;base64,")) for link in links), links
    assert any(a.get("http-equiv") == "Content-Security-Policy" for a in found.all("meta"))


@pytest.mark.parametrize("name", ["text", "digits"])
def test_it_says_what_it_contains_and_how_far_to_trust_it(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    text = " ".join(plain(pages[name]).text.split())
    found = made.gathered(runs[name])
    assert "This report contains training data." in text
    assert "The run was made on" in text
    assert "positive: the sample helped" in text
    assert all(" ".join(words.split()) in text for words in found.overview.quality.words)
    assert found.timeline.phases.words in text
    for hit in (found.helpful[0], found.harmful[0], found.answer.helpful[0], found.answer.harmful[0]):
        assert f"sample {hit.sample.id}" in text


def words_of(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_verdict_stands_with_its_reason_wherever_the_pages_have_it(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    reader, found = plain(pages[name]), made.gathered(runs[name])
    assert found.sources is not None
    answers = [a.quality for a in found.answers]
    judged = [found.overview.quality, found.sources.quality, found.hurt.quality, *answers]
    shown = [a["data-verdict"] for _, a in reader.elements if "data-verdict" in a]
    assert shown == [x.verdict for x in judged]
    text = words_of(reader.text)
    assert text.count("Early steps are understated") == len(judged)
    assert all(words_of(f"Trust: {x.verdict} {x.reason}") in text for x in judged)


@pytest.mark.parametrize("name", ["text", "digits"])
def test_harmful_samples_are_shown_with_their_last_use(
    name: str, pages: dict[str, Path], runs: dict[str, State]
) -> None:
    reader, hurt = plain(pages[name]), made.gathered(runs[name]).hurt
    assert words.lateness(hurt) in words_of(reader.text)
    raw = pages[name].read_text(encoding="utf-8")
    assert '<th scope="col" class="number">Last used</th>' in raw
    shown = re.findall(r'data-name="Last used">([\d,]+)</td>', raw)
    assert shown == [f"{max(h.sample.steps):,}" for h in hurt.items]


@pytest.mark.parametrize("name", ["text", "digits"])
def test_each_checkpoint_has_its_own_loss(name: str, pages: dict[str, Path], runs: dict[str, State]) -> None:
    losses = [written(a.query.loss) for a in made.gathered(runs[name]).answers]
    assert len(set(losses)) > 1
    raw = pages[name].read_text(encoding="utf-8")
    worked = raw[raw.index("<h2>One question, worked</h2>") :].partition("<h2>Two questions compared</h2>")[0]
    card, *moments = worked.split("<section data-moment=")
    assert "Its own loss" not in card
    assert [re.findall(r"Its own loss on this: (.+?) \(", x) for x in moments] == [[x] for x in losses]


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
        found = made.gathered(state).sources
        assert found is not None
        assert found.model_dump() == shown


@pytest.mark.parametrize("name", ["text", "digits"])
def test_one_question_is_answered_at_every_checkpoint(name: str, runs: dict[str, State]) -> None:
    state, found = runs[name], made.gathered(runs[name])
    assert [a.at for a in found.answers] == state.checkpoints
    asked = views_ask.stored(state, found.timeline.queries, 0)
    for answer in found.answers:
        expected = views_ask.answer(state, asked, answer.at, made.BEST, False)
        assert ids(answer.helpful) == ids(expected.helpful)
        assert ids(answer.harmful) == ids(expected.harmful)
    assert [r.at for r in found.answer.replay or []] == state.checkpoints


def test_samples_are_followed_and_harmful_ones_are_those_of_the_page(runs: dict[str, State]) -> None:
    state, found = runs["text"], made.gathered(runs["text"])
    assert ids(found.hurt.items) == ids(views.harmful(state, None, made.WORST, None).items)
    assert list(found.followed) == ids([*found.helpful[: made.FOLLOWED], *found.harmful[: made.FOLLOWED]])
    for name, values in found.followed.items():
        evolution = views_samples.life(state, name, None, False).evolution
        assert_alike([x.model_dump() for x in values], [x.model_dump() for x in evolution], rel=1e-5)
    assert found.life is not None
    again = views_samples.life(state, found.helpful[0].sample.id, None, True)
    assert_alike(found.life.model_dump(), again.model_dump(), rel=1e-5, abs=1e-7)


def test_hostile_text_is_only_text(pages: dict[str, Path]) -> None:
    raw = pages["text"].read_text(encoding="utf-8")
    assert "<script>document.title" not in raw


def test_pictures_are_in_the_file(pages: dict[str, Path]) -> None:
    found = [a["src"] for a in plain(pages["digits"]).all("img")]
    assert len(found) > 12
    assert all(src is not None and src.startswith("data:image/png;base64,") for src in found)


def test_the_query_set_can_be_chosen(runs: dict[str, State]) -> None:
    found = made.gathered(runs["text"], "poems")
    assert (found.timeline.queries, found.answer.query.set) == ("poems", "poems")
    assert found.helpful[0].influence > 0 > found.harmful[0].influence
    assert found.sources is not None
    assert found.sources.domains == ["code", "law", "poems"]  # passages holds the first of each


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
        for key in "oasrh/t":
            page.keyboard.press(key)
        expect(page.get_by_role("button", name="Theme: light")).to_be_visible()  # the last key has done its work
        page.keyboard.press("t")
        expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
        assert asked == []
        assert page.url == pages["text"].as_uri()
        visitor.close()


@pytest.mark.parametrize("name", ["text", "digits"])
def test_the_slider_works_in_the_file_alone(name: str, pages: dict[str, Path], runs: dict[str, State]) -> None:
    answers = made.gathered(runs[name]).answers
    with chromium() as browser:
        visitor = Visitor(browser, pages[name].parent.as_uri())
        page = visitor.see(f"/{name}.html")
        slider, seen = page.get_by_label("At checkpoint", exact=True), page.locator("[data-moment]:visible li.hit")

        def agrees(answer: shapes.Answer) -> None:
            expect(slider).to_have_attribute("aria-valuetext", re.compile(f"^step {answer.at:,}"))
            assert [x.get_attribute("data-id") for x in seen.all()] == ids([*answer.helpful, *answer.harmful])

        agrees(answers[-1])
        slider.press("ArrowLeft")
        agrees(answers[-2])
        page.locator("main").click(position={"x": 1, "y": 1})
        page.keyboard.press("[")
        agrees(answers[-3])
        page.get_by_role("button", name="Replay").click()
        expect(page.get_by_role("button", name="Replay")).to_have_attribute("aria-pressed", "false")
        agrees(answers[-1])
        visitor.close()


def test_without_a_script_every_checkpoint_is_there(pages: dict[str, Path], runs: dict[str, State]) -> None:
    moments = [a["data-moment"] for _, a in plain(pages["text"]).elements if "data-moment" in a]
    steps = [f"step {c:,}" for c in runs["text"].checkpoints]
    assert moments == [*steps[:-1], f"{steps[-1]} (final)"]
