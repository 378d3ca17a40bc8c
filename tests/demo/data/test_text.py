"""Documents from people's own files and rows, and the Penn Treebank out of a file that is never run."""

import hashlib
import json
from pathlib import Path

import pytest

from backstory.demo.data import text
from backstory.demo.data.fetch import DataError, Files, Package, cache_dir
from backstory.demo.data.text import Document
from backstory.errors import UsageError

CODE = b"penn = {}\r\npenn['train'] = \"\"\" a\\/b \r\n c \r\n\r\n\"\"\"\r\npenn['valid'] = ' d \\n'\npenn['test'] = ' e \\n'\n"
PARTS = {"ptb.train.txt": b" a\\/b \n c \n", "ptb.valid.txt": b" d \n", "ptb.test.txt": b" e \n"}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "TREEBANK", {n: hashlib.sha256(d).hexdigest() for n, d in PARTS.items()})


def package(monkeypatch: pytest.MonkeyPatch, code: bytes) -> None:
    def unpack(package: Package, *patterns: str) -> Files:
        return {"treebank/__init__.py": code}

    monkeypatch.setattr(text, "unpack", unpack)


def test_the_treebank_is_parsed_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, b"raise SystemExit('run')\n" + CODE)
    found = text.penn_treebank()
    assert found == (" a\\/b \n c \n", " d \n", " e \n")  # the empty last line of the package is gone
    assert {p.name: p.read_bytes() for p in (cache_dir() / "penn-treebank").iterdir()} == PARTS
    package(monkeypatch, b"")
    assert text.penn_treebank() == found


def test_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, b"penn = {}\npenn['train'] = 'x'\n")
    with pytest.raises(DataError, match=r"found \['ptb.train.txt'\] in the package"):
        text.penn_treebank()


def test_your_own_treebank(tmp_path: Path) -> None:
    for name, data in PARTS.items():
        (tmp_path / name).write_bytes(data)
    assert text.penn_treebank(tmp_path).valid == " d \n"
    (tmp_path / "ptb.test.txt").write_bytes(b"other")
    with pytest.raises(DataError, match="Get the official file"):
        text.penn_treebank(tmp_path)
    (tmp_path / "ptb.test.txt").unlink()
    with pytest.raises(DataError, match=r"has no file ptb\.test\.txt"):
        text.penn_treebank(tmp_path)


def test_a_folder_of_texts(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    (root / "letters").mkdir(parents=True)
    (root / "letters" / "one.txt").write_text("Dear ä\u2028you", encoding="utf-8")
    (root / "top.txt").write_text("top")
    (root / "rows.jsonl").write_text('{"text": "a\u2028b", "source": "web"}\n\n{"text": "c"}\n', encoding="utf-8")
    (root / "ignored.pdf").write_bytes(b"\xff")
    assert text.read_folder(root) == [
        Document("letters/one.txt", "letters", "Dear ä\u2028you"),
        Document("rows.jsonl:1", "web", "a\u2028b"),
        Document("rows.jsonl:3", "mine", "c"),
        Document("top.txt", "mine", "top"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", b'{"text": 1}\n{"words": "x"}', r"line 2: expected an object with the field \"text\""),
        ("a.jsonl", b"[1]", "line 1: expected an object"),
        ("a.jsonl", b"{", "line 1 is not JSON"),
        ("a.txt", b"\xff\xfe", "is not UTF-8"),
        ("a.pdf", b"", r"has no \.txt or \.jsonl"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        text.read_folder(tmp_path)


def test_rows_of_a_data_set() -> None:
    rows = [{"content": "a", "from": "x"}, {"content": "b", "from": "y"}]
    assert text.from_rows(rows, text="content", source="from") == [Document("0", "x", "a"), Document("1", "y", "b")]
    assert text.from_rows(iter(rows), text="content", name="mine")[1] == Document("1", "mine", "b")
    with pytest.raises(UsageError, match="row 0 has no column 'text'; it has content, from"):
        text.from_rows(rows)


def test_lines_of_json_read_back(tmp_path: Path) -> None:
    written = [Document("0", "s", 'quotes " and\nlines'), Document("1", "s", "")]
    lines = [json.dumps({"text": d.text, "source": d.source}) for d in written]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert [(d.source, d.text) for d in text.read_folder(tmp_path)] == [(d.source, d.text) for d in written]
