"""Every page and interaction in real Chromium on the demos' own runs: MNIST whole, text with its real passages at small size.

The data are those that `make data` has fetched into the cache; where they are not there, these tests are skipped with the reason.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, expect
from tests.web import recorded
from tests.web.browser.test_browser import compared, ids, move, paths, shown, sides
from tests.web.browsing import FITS, ROOT, Visitor, served

from backstory.demo.data import DataError
from backstory.results.sign import HELPED, HURT
from backstory.results.words import common_words
from backstory.web.pages import plain

pytestmark = pytest.mark.slow
RUNS = ("mnist", "domains")
SETS = {"mnist": "demo", "domains": "law"}


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The two recorded runs."""
    folder = tmp_path_factory.mktemp("demos")
    with recorded.from_the_cache():
        try:
            mnist, domains = recorded.mnist_demo(folder / "mnist"), recorded.domains_demo(folder / "domains")
        except DataError as error:
            pytest.skip(f"the demos' data cannot be had here: {error}")
        yield {"mnist": mnist, "domains": domains}


@pytest.fixture(scope="module")
def services(demos: dict[str, Path]) -> Iterator[dict[str, str]]:
    with served(demos["mnist"]) as one, served(demos["domains"]) as two:
        yield {"mnist": one, "domains": two}


@pytest.fixture
def visitor(request: pytest.FixtureRequest, browser: Browser, services: dict[str, str]) -> Iterator[Visitor]:
    """A window on the run that the test names."""
    actual = Visitor(browser, services[request.param], permissions=["clipboard-read", "clipboard-write"])
    yield actual
    actual.close()


each = pytest.mark.parametrize("visitor", RUNS, indirect=True)
on_mnist = pytest.mark.parametrize("visitor", ["mnist"], indirect=True)
on_domains = pytest.mark.parametrize("visitor", ["domains"], indirect=True)


def of(visitor: Visitor) -> str:
    """A query set of the run, for questions."""
    return next(s for s in SETS.values() if s in {q["name"] for q in visitor.json("/")["query_sets"]})


def post(visitor: Visitor, path: str, body: dict[str, Any]) -> Any:
    return visitor.context.request.post(visitor.address + path, data=body).json()


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("run", RUNS)
def test_every_page_fits_and_its_screen_is_kept(
    run: str, scheme: str, width: int, browser: Browser, services: dict[str, str]
) -> None:
    folder = ROOT / "build" / "screenshots"
    folder.mkdir(parents=True, exist_ok=True)
    visitor = Visitor(browser, services[run], viewport={"width": width, "height": 900}, color_scheme=scheme)
    for path in paths(visitor):
        page = visitor.see(path)
        page.evaluate("document.querySelectorAll('img').forEach((x) => { x.loading = 'eager'; })")
        page.wait_for_load_state("networkidle")
        name = "sample" if path.startswith("/samples/") else path.split("?")[0].split("/")[1] or "overview"
        page.screenshot(path=folder / f"demo-{run}-{name}-{scheme}-{width}.png", full_page=True)
        assert page.evaluate(FITS), f"{path} is wider than the window"
        expect(page.locator("h1")).to_be_visible()
    visitor.close()


@each
def test_the_overview_has_timeline_loss_trust_and_phases(visitor: Visitor) -> None:
    page, actual = visitor.see("/"), visitor.json("/")
    expect(page.locator("dl.facts")).to_contain_text(f"{actual['occurrences']:,}")
    for words in (actual["timeline"]["phases"]["words"], *actual["recording"]["words"]):
        expect(page.locator("main")).to_contain_text(words)
    bands = page.locator("[data-figure=figure-timeline] .shapelayer path")
    expect(bands).to_have_count(3 if actual["timeline"]["phases"]["present"] else 0)
    expect(page.locator("[data-figure=figure-loss] .scatterlayer path.js-line").first).to_be_visible()


def changed_query(visitor: Visitor) -> int:
    """The first one whose loss, as pages show it, the steps after the last checkpoint but one have changed."""
    for number in range(10):
        path = f"/queries/{of(visitor)}/{number}"
        last = visitor.json(path)
        earlier = visitor.json(f"{path}?at={last['checkpoints'][-2]}")
        if plain(earlier["input"]["loss"]) != plain(last["input"]["loss"]):
            return number
    raise AssertionError("no query's loss changes")


@each
def test_a_stored_query_is_answered_replayed_and_compared(visitor: Visitor) -> None:
    number = changed_query(visitor)
    path = f"/queries/{of(visitor)}/{number}"
    page, actual = visitor.see(path), visitor.json(path)
    assert (shown(page, "hits"), shown(page, "harmful")) == (ids(actual["hits"]), ids(actual["harmful"]))
    expect(page.locator("[data-side=hits] li.hit").first).to_contain_text(HELPED)
    expect(page.locator("[data-side=harmful] li.hit").first).to_contain_text(HURT)
    expect(page.locator("[data-figure=figure-by_step] .bars .point").first).to_be_attached()
    move(page, "ArrowLeft")
    step = actual["checkpoints"][-2]
    earlier = visitor.json(f"{path}?at={step}")
    assert shown(page, "hits") == ids(earlier["hits"])
    expect(page.get_by_label("The query", exact=True)).to_contain_text(f"Loss: {plain(earlier['input']['loss'])}")
    link = page.get_by_role("link", name="This page as JSON").get_attribute("href")
    assert page.request.get(f"{visitor.address}{link}").json()["at"] == step
    assert {x.get_attribute("value") for x in page.locator("input[type=hidden][name=at]").all()} == {str(step)}
    page.get_by_role("button", name="Show the ranking at every checkpoint").click()
    page.wait_for_selector("[data-figure=figure-places_hits]")
    visitor.drawn()
    page.get_by_label("Query index").fill(str(number + 1))
    page.get_by_role("button", name="Compare", exact=True).click()
    visitor.drawn()
    asked = f"/compare?set={of(visitor)}&index={number}&set2={of(visitor)}&index2={number + 1}&at={step}"
    assert sides(page) == compared(visitor.json(asked))


@on_domains
def test_typed_text_is_answered_shaded_and_compared(visitor: Visitor) -> None:
    text = "The court held that the defendant was liable."
    page = visitor.see("/query")
    page.get_by_label("Your text").fill(text)
    page.get_by_role("button", name="Query", exact=True).click()
    visitor.drawn()
    actual = post(visitor, "/query", {"text": text})
    assert (shown(page, "hits"), shown(page, "harmful")) == (ids(actual["hits"]), ids(actual["harmful"]))
    common = {w for x in actual["samples"].values() for w in common_words(x["text"], text)}
    assert {m.casefold() for m in page.locator(".hit mark").all_inner_texts()} == common
    page.get_by_role("button", name="Shade the tokens").click()
    expect(page.locator("#ranking .tokens")).to_have_count(20)
    other = "In the beginning was the word."
    page.get_by_label("The other text").fill(other)
    page.get_by_role("button", name="Side by side with this text").click()
    visitor.drawn()
    answers = [actual, post(visitor, "/query", {"text": other})]
    assert sides(page) == [ids(x["hits"]) + ids(x["harmful"]) for x in answers]


@on_mnist
def test_an_image_is_uploaded_and_compared(visitor: Visitor, tmp_path: Path) -> None:
    file = tmp_path / "digit.png"
    file.write_bytes(
        visitor.context.request.get(visitor.address + visitor.json("/samples?per=1")["items"][0]["image"]).body()
    )
    page = visitor.see("/query")
    page.get_by_label("Your image").set_input_files(file)
    page.get_by_label("Its label").fill("3")
    page.locator("form", has=page.get_by_label("Your image")).get_by_role("button", name="Query").click()
    visitor.drawn()
    before = shown(page, "hits") + shown(page, "harmful")
    assert len(before) == 20
    assert page.locator(".hit img").first.evaluate("(x) => x.decode().then(() => x.naturalWidth)") == 28
    page.get_by_label("The other image").set_input_files(file)
    page.get_by_label("What the other one shows").fill("5")
    page.get_by_role("button", name="Side by side with this image").click()
    visitor.drawn()
    left, right = sides(page)
    assert left == before
    assert right != before


@each
def test_samples_are_searched_and_one_shows_its_whole_life(visitor: Visitor) -> None:
    page = visitor.see("/samples")
    page.get_by_label("Sort by").select_option("value")
    page.get_by_role("button", name="Search").click()
    page.locator("main tbody a").first.click()
    visitor.drawn()
    path = visitor.json("/samples?sort=value&per=1")["items"][0]["path"]
    actual = visitor.json(path)
    expect(page.locator("h1")).to_contain_text(actual["sample"]["id"])
    for name in ("evolution", "occurrences"):
        expect(page.locator(f"[data-figure=figure-{name}] .main-svg").first).to_be_visible()
    assert (
        page.locator("section[aria-labelledby=neighbours] .hit").count() == len(actual["neighbours"]["neighbours"]) > 0
    )
    page.get_by_role("link", name="Compute").click()
    page.wait_for_selector("#overwriting table")
    visitor.drawn()


@each
def test_sources_have_a_heat_map_where_there_are_domains_and_come_as_csv(visitor: Visitor) -> None:
    page, actual = visitor.see("/sources"), visitor.json("/sources")
    assert actual["domains"] == [
        q["name"] for q in visitor.json("/")["query_sets"] if q["name"] not in ("demo", "passages")
    ]
    assert page.locator("[data-figure=figure-matrix]").count() == (len(actual["domains"]) > 1)
    with page.expect_download() as waiting:
        page.get_by_role("link", name="Download as CSV").click()
    rows = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert [row[0] for row in rows[1:]] == actual["sources"]
    page.locator("[data-figure=figure-sources] .bars .point path").first.click(force=True)
    page.wait_for_url("**/samples?*")
    visitor.drawn()


@each
def test_harmful_ids_are_exported(visitor: Visitor) -> None:
    page, actual = visitor.see("/harmful?top=8"), visitor.json("/harmful?top=8")["harmful"]
    page.get_by_label(f"Select sample {actual[1]['sample']}", exact=True).check()
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Export ids as CSV").click()
    rows = list(csv.reader(io.StringIO(Path(waiting.value.path()).read_text())))
    assert [r[0] for r in rows] == ["id", str(actual[1]["sample"])]


@each
def test_replay_goes_through_all_checkpoints(visitor: Visitor) -> None:
    page, asked = visitor.see(f"/queries/{of(visitor)}/0"), list[str]()
    steps, button = visitor.json("/")["checkpoints"], page.get_by_role("button", name="Replay")
    page.on("request", lambda request: asked.extend(re.findall(r"at=(\d+)", request.url)))
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    expect(button).to_have_attribute("aria-pressed", "false")
    assert asked == [str(step) for step in steps]
    expect(page.locator("#ranking")).to_contain_text(f"On the model at step {steps[-1]:,} (final)")
    visitor.drawn()
