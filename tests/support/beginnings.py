"""The text demo without its corpus: made-up documents, and a folder of this process for what runs begin from."""

import tempfile
from collections.abc import Callable, Iterable

import pytest

from backstory.demo import pretrained
from backstory.demo.data import Document, corpus
from backstory.demo.data.domains import SOURCES

FOLDER = tempfile.TemporaryDirectory(
    prefix="beginnings-"
)  # removed with the process; one for all, so that patches may nest


def replace_corpus(
    patch: pytest.MonkeyPatch,
    documents: Callable[..., list[Document]] = corpus,
    names: Iterable[str] = tuple(SOURCES),
) -> None:
    """The text demo reads these documents (without arguments the real ones), and writes nothing into the user's cache."""
    patch.setattr(pretrained, "corpus", documents)
    patch.setattr(pretrained, "SOURCES", tuple(names))
    patch.setattr(pretrained, "FOLDER", FOLDER.name)
