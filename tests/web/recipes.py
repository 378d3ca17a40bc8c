"""A very small run of text with hostile ids and contents, as a recipe and as a recording."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from tests.support.plain import assert_alike
from torch import Tensor

import backstory
from backstory.demo.data import Bytes
from backstory.demo.data.typed import encode_text, pieces, show_queries, text_of
from backstory.demo.gpt_model import GPT, counts, loss
from backstory.replay.recipe import Presentation, Recipe, take_step

# What is behind one influence, in float32: width and letters for each token there and back, and the run's 136 numbers.
TERMS = 2 * 12 * (8 + 256) + 136
RECIPE, TOLD = "tests.web.recipes:recipe", "tests.web.recipes:told"
LENGTH, STEPS, BATCH = 12, 24, 3
SCRIPT = "<script>alert(1)</script>"
TEXTS = {
    "law/1/0": "the court held",
    "law/1/12": "the judge said",
    "law/2/0": "a court of law",
    "poems/1/0": "roses are red.",
    "poems/1/12": "violets, blue.",
    "poems/2/0": "sugar is sweet",
    "../../etc/passwd": "path of a file",
    "a'b\"c?d#e&f=%41": "quotes in ids.",
    "tags": SCRIPT[:14],
}
SOURCES = {name: name.split("/")[0] if "/" in name and name[0] != "." else "odd" for name in TEXTS}


def tokens(texts: list[str]) -> Tensor:
    return torch.stack([torch.tensor(Bytes().encode(text)[: LENGTH + 1]) for text in texts])


def encoded(data: bytes, label: str | None) -> Tensor:
    """No image at all: its length and its label as text."""
    return tokens([f"{len(data):06d} {label or 'none':>12}"])


def recipe(seed: int = 0) -> Recipe:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(vocabulary=256, length=LENGTH, layers=1, width=8, heads=2)
    names, order = list(TEXTS), torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(len(names), generator=order) for _ in range(STEPS * BATCH // len(names))]
    ids = [[names[i] for i in part] for part in torch.cat(epochs).split(BATCH)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, loss_reduction="token-mean", tokens=counts,
        batches=[(some, tokens([TEXTS[name] for name in some])) for some in ids],
        queries={"law": tokens(["this court said", "that judge held"]), "poems": tokens(["red roses, sweet", "blue is sweet!!"])},
        page=Presentation(
            text=partial(encode_text, tokenizer=Bytes(), length=LENGTH), image=encoded,
            show=partial(show_queries, tokenizer=Bytes()), pieces=partial(pieces, tokenizer=Bytes()),
        ),
    )  # fmt: skip


def told(seed: int = 0) -> Recipe:
    """The same, with queries that have a label and an image, and a model that answers with their first letter."""

    def label(batch: Tensor) -> list[dict[str, Any]]:
        return [{"text": text_of(x, Bytes()), "label": "t", "image": b"\x89PNG small"} for x in batch]

    made = recipe(seed)
    page = replace(made.page, predict=lambda model, batch: [text_of(x, Bytes())[:1] for x in batch], show=label)
    return replace(made, page=page)


def recorded(path: Path, *, embed: bool = True, **settings: Any) -> Path:
    """The recipe's run with everything that a service can show."""
    made = recipe()
    with backstory.record(
        made.model, made.optimizer, path, loss_reduction="token-mean", rank=4, warmup_steps=6, encoding="float32",
        steps=STEPS, checkpoints=2, recipe=RECIPE, **settings,
    ) as rec:  # fmt: skip
        for t, (ids, batch) in enumerate(made.batches):
            with rec.step(ids, tokens=counts(batch)) as s:
                s.losses(take_step(made, t))
        names = list(TEXTS)
        rec.describe(
            names, text=[text_of(tokens([TEXTS[n]])[0], Bytes()) for n in names], source=[SOURCES[n] for n in names],
            label=[f"label {len(n) % 2}" for n in names],
            image=cast("list[bytes]", [b"\x89PNG\r\n\x1a\n" + n.encode() if n.startswith("law") else None for n in names]),
        )  # fmt: skip
    run = backstory.open(path)
    run.add_queries("law", made.queries["law"])
    if embed:
        run.embed()
    return path


def assert_same_hits(actual: Any, expected: Any) -> None:
    """Hits, or all of an answer, of one question that was asked twice: the same but for rounding."""
    hits = expected if isinstance(expected, list) else [*expected["hits"], *expected["harmful"]]
    rounding = TERMS * 2**-24
    assert_alike(actual, expected, rel=rounding, abs=rounding * max(abs(h["influence"]) for h in hits))


def copied(path: Path, to: Path) -> Path:
    shutil.copytree(path, to)
    return to
