"""The site: its pages' bounds, links and coverage, and the strict build."""

import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import backstory

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(file for file in DOCS.rglob("*.md") if not file.is_relative_to(DOCS / "results"))
LONGEST, ALL = 1_500, 27_000
MODULES = ["backstory", *(f"backstory.{x}" for x in ("insight", "exact", "baselines", "results", "replay"))]


def words(file: Path) -> int:
    return len(file.read_text().split())


def test_pages_are_short() -> None:
    long = {str(file.relative_to(DOCS)): words(file) for file in PAGES if words(file) >= LONGEST}
    assert not long, f"pages of {LONGEST} words or more: {long}. Move measured tables to experiments/results"
    assert sum(map(words, PAGES)) < ALL


def test_the_glossary_has_eighteen_words_in_order() -> None:
    terms = re.findall(r"^(\S.*)\n: ", (DOCS / "glossary.md").read_text(), flags=re.M)
    assert len(terms) == 18, terms
    assert terms == sorted(terms, key=str.lower)


@pytest.mark.parametrize("file", [*ROOT.glob("*.md"), *PAGES], ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_files(file: Path) -> None:
    for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", file.read_text()):
        assert (file.parent / link).exists(), f"{file.relative_to(ROOT)} links to {link}, which is not there"


def test_public_names_are_few() -> None:
    assert sorted(backstory.__all__) == [
        "BackstoryError", "Influence", "Presentation", "Recipe", "Recorder", "Run", "Settings", "__version__", "open", "plan", "record", "register", "register_optimizer", "with_ids",
    ]  # fmt: skip


def documented() -> list[object]:
    """Everything that a page of the API takes from a docstring."""
    pages = "".join(file.read_text() for file in (DOCS / "reference" / "api").glob("*.md"))
    paths = re.findall(r"^\.\. auto\w+:: ([\w.]+)\.(\w+)$", pages, flags=re.M)
    return [getattr(importlib.import_module(module), name) for module, name in paths]


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_in_the_reference(module: str) -> None:
    listed = documented()
    names = importlib.import_module(module).__all__
    missing = [x for x in names if not any(getattr(importlib.import_module(module), x) is y for y in listed)]
    assert [x for x in missing if x != "__version__"] == []


@pytest.mark.parametrize(
    ("page", "name"), [("recording", "record"), ("recording", "Settings"), ("run", "Run.query"), ("replay", "Recipe")]
)
def test_every_argument_is_explained(page: str, name: str) -> None:
    tables = re.findall(r"^\| (`.*?) \|", (DOCS / "reference" / "api" / f"{page}.md").read_text(), flags=re.M)
    named = {argument for cell in tables for argument in re.findall(r"`(\w+)`", cell)}
    thing: Any = backstory
    for part in name.split("."):
        thing = getattr(thing, part)
    arguments = set(inspect.signature(thing).parameters) - {"self", "short", "unverified"}
    assert sorted(arguments - named) == []


def test_pages_that_are_empty_unbuilt_begin_with_where_to_read() -> None:
    generated = [page for page in PAGES if re.search(r"^(COMMANDS|\.\. auto\w+::)", page.read_text(), flags=re.M)]
    assert len(generated) == 9
    for page in generated:
        note = page.read_text().split("\n\n")[1]
        assert re.fullmatch(r"\*Built by `make docs`\. .*\*", note), page
        assert "help" in note, page


@pytest.mark.slow  # it reads every docstring and measured table: half a minute of processor time
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-d", str(tmp_path / "trees")]
    built = subprocess.run(
        [*command, str(DOCS), str(tmp_path / "site")], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert built.returncode == 0, built.stderr
    recording = re.sub(r"<[^>]+>", "", (tmp_path / "site/reference/api/recording.html").read_text())
    assert "record(" in recording
    assert "Built by" not in recording
