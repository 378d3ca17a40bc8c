"""Plain English: phrases that read like a translation, and are gone from everything that a user can see.

A number in a phrase stands for any short text, since the source has a value there; a line break or the end of a string within a
phrase does not hide it.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"src": (".py", ".html", ".js", ".css"), "docs": (".md", ".py", ".html", ".svg"), "examples": (".py",)}
GENERATED = ROOT / "docs" / "results"  # a copy of experiments/results, made when the site is built
PHRASES = """\
with ids for the examples. Recording it and asking it takes eight lines
says in plain words how far to trust an answer
your own layers by one function
Llama and plain ones
each sequence weighs what its tokens weigh
a callback of one line
see who helped and who hurt
curvature as the mean over stretches of steps
The truth by retraining, as a function
An occurrence takes 38 and 66 kB
pay more in relation
no command makes these figures yet
no GPU was at hand
or pip brings gigabytes of CUDA
Print the version and leave.
Print one JSON object last.
Say what a run holds, and whether it is sound.
0: any that is free.
Questions that may wait or run; more are told to come again.
Do not ask.
Samples, with commas: these against all others.
Where the trial is written and removed.
to import it without a question
what chance alone gives in 99 of 100 cases; above 1 it is no chance
the model was asked in eval mode
The recorded parameters hold 100.0% of the squared gradient norm
The subspace keeps 90% of the step gradients' energy
The largest rate × curvature is 0.8 times its stable limit
Kept of a gradient: 486 numbers
Samples 4,000 different ones
Ask which of them made it do something
Mattered for the query set
What cannot be asked here, and how to get it
Number in it
Samples on either side
Left empty: what the model says of it.
Its own loss on this: 3.16
the recipe's own loss, in nats where that is a cross-entropy
what is being computed takes about 52 s with this; a question has 30 s
Which later samples took over its lesson? Find out
no half of a file is left
it asks nobody for anything
whether it lives
with 2 where something that you can mend is wrong
where the recording was told losses
""".splitlines()


def pattern(phrase: str) -> re.Pattern[str]:
    """The phrase as it may stand in a source: values in place of its numbers, but for single digits."""
    parts = (r".{1,60}?" if re.fullmatch(r"\d[\d.,]+%?", word) else re.escape(word) for word in phrase.split())
    return re.compile(" ".join(parts), flags=re.IGNORECASE)


def flat(text: str) -> str:
    """A text on one line: strings that are written one after the other are one, and tags are none."""
    joined = re.sub(r"""["']\s*\n\s*[rfb]*["']""", "", text)
    return re.sub(r"\s+", " ", re.sub(r"</?\w+[^<>\n]*>", " ", joined))


def texts() -> dict[str, str]:
    files = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder, kinds in FOLDERS.items():
        files += [
            file
            for file in sorted((ROOT / folder).rglob("*"))
            if file.suffix in kinds and GENERATED not in file.parents
        ]
    return {
        str(file.relative_to(ROOT)): flat(file.read_text(encoding="utf-8"))
        for file in files
        if "vendor" not in file.parts
    }


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return texts()


def test_the_search_reads_code_templates_and_pages(sources: dict[str, str]) -> None:
    assert {"README.md", "src/backstory/cli/app.py", "src/backstory/web/templates/base.html"} <= sources.keys()
    assert any(name.startswith("docs/") for name in sources)


@pytest.mark.parametrize(
    ("phrase", "source"),
    [
        ("An occurrence takes 38 and 66 kB", 'f"An occurrence takes {a} and "\n    f"{b:.0f} kB."'),
        ("pay more in relation", "they\npay more in\n  relation"),
        ("The subspace keeps 90% of the step gradients' energy", "the subspace keeps {kept:.0%} of the step gradients' energy"),
        ("Number in it", "<label><b>Number</b> in it</label>"),
    ],
)  # fmt: skip
def test_a_phrase_is_found_as_sources_write_it(phrase: str, source: str) -> None:
    assert phrase in PHRASES
    assert pattern(phrase).search(flat(source))


@pytest.mark.parametrize("phrase", PHRASES)
def test_the_phrase_is_gone(phrase: str, sources: dict[str, str]) -> None:
    search = pattern(phrase)
    left = [
        f"{name}: …{text[max(0, hit.start() - 30) : hit.end() + 30]}…"
        for name, text in sources.items()
        for hit in search.finditer(text)
    ]
    assert not left, "\n".join(left)


def test_errors_are_sentences() -> None:
    files = [file for folder in ("src", "experiments") for file in (ROOT / folder).rglob("*.py")]
    read = {str(file.relative_to(ROOT)): flat(file.read_text(encoding="utf-8")) for file in files}
    assert "experiments/cli.py" in read
    assert not [name for name, text in read.items() if re.search(r"[\"']found [^.]*; expected|; expected ", text)]
