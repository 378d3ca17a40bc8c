"""Small real runs: digits with images, text in three made-up domains; and the demos' own, with their real data."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.beginnings import replace_corpus
from torch import Tensor

import backstory
from backstory.demo import digits, texts
from backstory.demo.data import DataError, Document, fetch
from backstory.demo.digits import image_demo, png
from backstory.demo.texts import text_demo
from backstory.replay.recipe import Recipe, take_step

HOSTILE = "<script>document.title='taken'</script>"
SMALL: dict[str, Any] = {
    "steps": 24,
    "pretraining": 8,
    "batch_size": 8,
    "length": 12,
    "layers": 1,
    "width": 32,
    "vocabulary": 300,
}
WORDS = {
    "law": ("the court", "a witness", "this statute", "the tenant", "held", "denied", "the appeal", "the contract"),
    "poems": ("the moon", "a river", "my garden", "the swallow", "sang", "forgot", "the morning", "the harbour"),
    "code": ("return", "import", "for item in", "class Tree", "yield", "raise", "self.value", "range(10)"),
}


def corpus(sources: Sequence[str] | None = None, limit: int = 0) -> list[Document]:
    """Three domains with words of their own, and a tag in each: stands in for the corpus that is fetched."""
    out = []
    for name, words in WORDS.items():
        if sources is not None and name not in sources:
            continue
        picked = (f"{words[k % 4]} {words[4 + k * k % 2]} {words[6 + k // 3 % 2]} {k}." for k in range(200))
        out.append(Document("0", name, f"{HOSTILE} " + " ".join(picked)))
    return out


def without_network() -> Iterator[None]:
    """`corpus` made up."""
    with pytest.MonkeyPatch.context() as patch:
        replace_corpus(patch, corpus, WORDS)
        yield


def text_run(out: Path) -> Path:
    """The text demo at small size, with embeddings; needs `without_network`."""
    return _embedded_demo(out, SMALL)


def _embedded_demo(out: Path, sizes: dict[str, Any]) -> Path:
    """The text demo with so few coordinates that its run can have embeddings."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(texts.SETTINGS, "rank", 16)
        text_demo(out, **sizes)
    backstory.open(out / "run").embed()
    return out / "run"


@contextmanager
def from_the_cache() -> Iterator[None]:
    """Data that were fetched before; where they were not, `DataError`."""

    def refused(package: object, folder: Path) -> Path:
        raise DataError("it is not in the cache: `make data` fetches it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "download", refused)
        replace_corpus(patch)
        yield


def domains_demo(out: Path) -> Path:
    """The text demo with its real passages of eight domains, at a size that takes half a minute."""
    sizes = {
        "steps": 160,
        "pretraining": 80,
        "length": 24,
        "layers": 2,
        "width": 48,
        "vocabulary": 1024,
        "megabytes": 0.2,
    }
    return _embedded_demo(out, {**SMALL, **sizes})


def mnist_demo(out: Path) -> Path:
    """The demo on MNIST, whole but for the retraining of samples drawn at random."""
    image_demo(out, source="mnist", n_queries=2, n_random=0)
    return out / "run"


def digits_run(path: Path) -> Path:
    """One epoch of the digits of the demo, with images and labels, and five queries."""
    args = {"source": "digits", "epochs": 1}
    plan = digits.recipe("digits", epochs=1)
    settings: dict[str, Any] = {"rank": 8, "checkpoints": 3, "steps": len(plan.batches), "warmup_steps": 4}
    with backstory.record(
        plan.model, plan.optimizer, path, loss_reduction="mean", recipe=digits.RECIPE, recipe_args=args, **settings
    ) as rec:
        for t, (ids, _) in enumerate(plan.batches):
            with rec.step(ids) as s:
                s.losses(take_step(plan, t))
        ids, images, labels = zip(*((i, png(x[0]), int(y)) for i, x, y in _samples(plan)), strict=True)
        rec.describe(ids, image=images, label=labels)
    run = backstory.open(path)
    x, y = plan.queries["test"]
    run.add_queries("demo", (x[:5], y[:5]))
    run.embed()
    return path


def _samples(plan: Recipe) -> Iterator[tuple[int | str, Tensor, Tensor]]:
    for ids, (xs, ys) in plan.batches:
        yield from zip(ids, xs, ys, strict=True)
