"""What people see before they install: bounds of the README and of CONTRIBUTING, the picture, and metadata that agree."""

import re
import tomllib
from pathlib import Path

import pytest

import backstory

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def section(title: str) -> list[str]:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0].strip().splitlines()


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 90
    assert len(README.split()) <= 700


def test_the_readme_begins_with_one_sentence_and_one_picture() -> None:
    title, first, picture = README.split("\n\n")[:3]
    assert title == "# Backstory"
    assert first.startswith("Backstory is `git blame` for trained models: ")
    assert first.count(". ") == 0
    assert picture.startswith("![")
    assert README.count("![") == 1


def test_the_example_has_twelve_lines_and_prints() -> None:
    *_, code = re.findall(r"^```python\n(.*?)^```", README, flags=re.M | re.S)
    assert len(code.strip().splitlines()) <= 12
    (printed,) = re.findall(r"^```text\n(.*?)^```", README, flags=re.M | re.S)
    assert printed.strip()


def test_lists_and_table_of_the_readme_have_five_lines() -> None:
    assert [line[:2] for line in section("Good at")] == ["- "] * 5
    assert [line[:2] for line in section("When not to use it")] == ["- "] * 5
    (table,) = re.findall(r"(?:^\|.*\n)+", README, flags=re.M)
    assert len(table.splitlines()) == 2 + 5


RESULTS = ROOT / "experiments" / "results"
BEHIND = {  # the section of fidelity.md and its method; the beginning of a line of recordings.md, and which of its numbers
    "MLP on MNIST, SGD": ("GELU net, SGD:", "influence-ggn-swept", "| sgd | `{}` |", 0),
    "The same with AdamW": ("GELU net, AdamW:", "influence-swept", "| adamw | `{}` |", 0),
    "Small GPT, fine-tuned": ("GPT, fine-tuning", "influence-swept", "### Fine-tuned\n| `{}` |", 4),
    "The same from scratch": (None, None, "### From scratch\n| `{}` |", 4),
    "CNN, with exact influences": (None, None, "extra passes a step\n| `{}` |", 0),
}


@pytest.mark.parametrize("row", BEHIND)
def test_fidelity_in_the_readme_is_that_of_the_measured_pages(row: str) -> None:
    title, method, line, number = BEHIND[row]
    post_hoc, *presets = cells(row)
    if title is not None:
        part = (RESULTS / "fidelity.md").read_text(encoding="utf-8").partition(f"\n## {title}")[2].partition("\n## ")[0]
        measured = re.findall(rf"^\| `{re.escape(str(method))}`[^|]*\|.*?\| (\d\.\d{{3}}) \|", part, flags=re.M)[0]
        assert post_hoc == f"{float(measured):.2f}"
    recordings = (RESULTS / "recordings.md").read_text(encoding="utf-8")
    for cell, preset in zip(presets, ("default", "best"), strict=True):
        where, _, start = line.format(preset).rpartition("\n")
        lines = (recordings.partition(where)[2] if where else recordings).splitlines()
        (found, *_) = [x for x in lines if x.startswith(start)] or [""]
        numbers = re.findall(r"\| (\d\.\d\d) (?=\|)", found)
        assert cell == (numbers[number] if numbers else ""), f"{preset}: {found} in recordings.md, {cell} in README.md"


FORMER = "learned-16-empirical/6"  # fidelity.md was measured while it was the default
EARLY = (ROOT / "docs" / "explanation" / "early.md").read_text(encoding="utf-8")


def lines_of(text: str) -> dict[str, list[str]]:
    """The first line of tables that names each method in code, without its first cell."""
    named: dict[str, list[str]] = {}
    for first, *rest in (line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")):
        for name in re.findall(r"`([^`]+)`", first):
            named.setdefault(name, [cell.strip() for cell in rest])
    return named


@pytest.mark.parametrize("part", ["From scratch", "Fine-tuned"])
def test_early_influence_is_quoted_from_the_measured_page(part: str) -> None:
    page = (RESULTS / "fidelity.md").read_text(encoding="utf-8").partition("\n## GPT by thirds of the run")[2]
    measured = page.partition(f"\n### {part}")[2].partition("With exact unrolling:")[2].partition("\n#")[0]
    quoted = lines_of(EARLY.partition(f"\n### {part}")[2].partition("\n#")[0])
    assert {FORMER, "paper", "no-curvature", "full-exact", "full-hessian"} <= quoted.keys()
    for method, line in quoted.items():
        expected = lines_of(measured)["default" if method == FORMER else method]
        assert line == expected, f"{method}: {line} in early.md, {expected} measured"


def cells(row: str) -> list[str]:
    """The numbers of a row of the README's table."""
    (line,) = (line for line in section("Fidelity and cost") if line.startswith(f"| {row} |"))
    return [cell.strip() for cell in line.split("|")[2:5]]


def test_the_picture_is_small_and_loads_nothing() -> None:
    (name,) = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", README)
    file = ROOT / name
    assert file.stat().st_size < 150_000
    assert not re.search(r"(href|src)=\"(?!data:)", file.read_text(encoding="utf-8"))


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_bytes()) <= 8_000


def test_the_version_is_one() -> None:
    assert f"\n## {backstory.__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"\nversion: {backstory.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert backstory.__version__.rpartition(".")[0] in (ROOT / "SECURITY.md").read_text(encoding="utf-8")


def test_metadata_for_a_package_index() -> None:
    assert 20 < len(PROJECT["description"]) < 120
    assert len(PROJECT["keywords"]) >= 5
    assert "Programming Language :: Python :: 3.11" in PROJECT["classifiers"]
    assert not any(name.startswith("License ::") for name in PROJECT["classifiers"])  # `license` has it


def test_extras_are_installed_from_the_checkout() -> None:
    """The package is on no index yet."""
    places = [file for folder in ("docs", "src", "experiments") for file in (ROOT / folder).rglob("*")]
    texts = {file: file.read_text(encoding="utf-8") for file in places if file.suffix in (".md", ".py", ".html")}
    assert [str(file) for file, text in texts.items() if "backstory[" in text] == []
    assert sum("pip install '.[" in text for text in texts.values()) >= 10


def test_the_demo_installs_only_what_it_needs() -> None:
    """And tests find everything, whichever was made first."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = dict(re.findall(r"^([^\s:#]+): *([^#\n=]*)", makefile, flags=re.M))
    recipe = makefile.partition("\n.venv/demo-ready:")[2].partition("\n\n")[0]
    assert re.findall(r"-e '\.\[(.*?)\]'", recipe) == ["demo,pandas"]
    assert rules["demo"].split() == [".venv/demo-ready"]
    assert rules[".venv/ready"].split() == [".venv/demo-ready"]
    assert {name for name, needs in rules.items() if ".venv/ready" in needs.split()} >= {"test", "check", "docs"}


def test_links_lead_somewhere() -> None:
    for file in [*ROOT.glob("*.md"), *(ROOT / "experiments" / "results").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", file.read_text(encoding="utf-8")):
            assert (file.parent / link).exists(), f"{file.name} links to {link}"
