"""The demo on text: a small GPT on bytes of eight domains, AdamW as the paper trains its language models, recorded by default.

Passages of one length, each used once, drawn and ordered by a seed; other passages of each domain are the queries.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import UsageError
from ..insight.sources import Sources, sources
from ..insight.timeline import Timeline, timeline_of
from ..replay.recipe import Presentation, Recipe
from ..results.influence import Influence
from .data import Bytes, Sequences, corpus, cut
from .gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, warmup_cosine
from .stages import Progress, Stages, prepare_folder, record_recipe

RECIPE = "backstory.demo.texts:recipe"
LEARNING_RATE = 2e-3  # the highest
WARMUP, END = 0.05, 0.01  # the part of the steps that leads to it, and its part at the end
QUERIES = 16  # passages of each domain for queries
CHECKPOINTS = 4
TOP = 3  # passages at either end of a result
CAUTION = (
    "This model was trained from scratch, where recorded scores are weakest: in our GPT study their rank "
    "correlation with retraining is about 0.3 (fine-tuned: 0.77), magnitudes are several times too small, and single signs can be wrong. "
    "Check what matters by retraining (backstory.exact)."
)


class Passages(NamedTuple):
    """What the seed draws."""

    ids: list[str]
    tokens: Tensor  # (N, length + 1)
    domains: list[str]
    queries: Tensor  # (domains, QUERIES, length + 1)


def recipe(
    steps: int = 1280,
    batch_size: int = 16,
    length: int = 96,
    layers: int = 3,
    width: int = 96,
    megabytes: float = 0.5,
    seed: int = 0,
) -> Recipe:
    """Model, optimizer, schedule, loss and batches; ids say source, document and place."""
    drawn = passages(steps * batch_size, length, megabytes, seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(vocabulary=256, length=length, layers=layers, width=width, heads=4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=DECAY)
    parts = drawn.tokens.split(batch_size)
    names = [drawn.ids[t * batch_size : (t + 1) * batch_size] for t in range(steps)]
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, batches=list(zip(names, parts, strict=True)),
        loss_reduction="token-mean", tokens=counts, clip_norm=CLIP,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, steps, WARMUP, END)),
        queries={"passages": drawn.queries[:, 0], **dict(zip(drawn.domains, drawn.queries, strict=True))},
        page=Presentation(text=partial(encode_text, length=length), show=show_queries, pieces=pieces),
    )  # fmt: skip


@lru_cache(maxsize=2)
def passages(count: int, length: int, megabytes: float, seed: int) -> Passages:
    """`count` passages for training and QUERIES others of each domain for queries."""
    pool = _pool(length + 1, megabytes)
    order = torch.randperm(len(pool.ids), generator=torch.Generator().manual_seed(seed)).tolist()
    domains = sorted(set(pool.sources))
    queries = {name: [i for i in order if pool.sources[i] == name][:QUERIES] for name in domains}
    taken = {i for some in queries.values() for i in some}
    used = [i for i in order if i not in taken][:count]
    if len(used) < count or any(len(some) < QUERIES for some in queries.values()):
        raise UsageError(
            f"the corpus is too small: after {QUERIES} queries from each source it has {len(used):,} passages for training, "
            f"and this run needs {count:,}. Use fewer steps, or more megabytes."
        )
    texts = torch.stack([pool.tokens[queries[name]] for name in domains])
    return Passages([pool.ids[i] for i in used], pool.tokens[used], domains, texts)


@lru_cache(maxsize=2)
def _pool(length: int, megabytes: float) -> Sequences:
    return cut(corpus(limit=round(megabytes * 1e6)), Bytes(), length)


def text_of(tokens: Tensor) -> str:
    """A passage as people read it."""
    return Bytes().decode(tokens.tolist())


def encode_text(text: str, length: int) -> Tensor:
    """A text as sequences of at most `length` + 1 bytes; a long text is cut evenly, (n, ≤ length + 1)."""
    tokens = torch.tensor(Bytes().encode(text), dtype=torch.int64)
    if len(tokens) < 2:
        raise UsageError(
            f"the text must have 2 or more bytes, since each byte is predicted from those before it, got {len(tokens)}."
        )
    n = math.ceil((len(tokens) - 1) / length)  # each byte but the first has a loss
    size = math.ceil((len(tokens) - 1) / n) + 1
    starts = [round(k * (len(tokens) - size) / max(1, n - 1)) for k in range(n)]
    return torch.stack([tokens[lo : lo + size] for lo in starts])


def show_queries(tokens: Tensor) -> list[dict[str, str]]:
    """What a person sees of queries."""
    return [{"text": text_of(x)} for x in tokens]


def pieces(tokens: Tensor, place: int) -> Sequence[str]:
    """The text of each position of one sequence of a batch; a character of several bytes stands at its last one."""
    out, waiting = [], b""
    for value in tokens[place][:-1].tolist():
        waiting += bytes([value])
        whole = waiting.decode(errors="ignore")
        broken = len(waiting) > 3 and not whole
        out.append("\ufffd" if broken else whole)
        waiting = b"" if whole or broken else waiting
    return out


@dataclass(frozen=True)
class TextDemo:
    """The run that the demo leaves, and its results on one unseen passage of each domain."""

    run: str
    loss: float  # nats a byte on unseen passages
    domains: list[str]
    passages: list[str]  # the query of each domain
    influence: Influence
    sources: Sources  # on all unseen passages
    timeline: Timeline
    seconds: dict[str, float]
    recipe: ClassVar[str] = RECIPE
    queries: ClassVar[str] = "passages"  # the query set that the run stores

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        results = [
            {"domain": domain, "text": text, **self.influence.as_dict(top=TOP, query=k)}
            for k, (domain, text) in enumerate(zip(self.domains, self.passages, strict=True))
        ]
        return {
            "run": self.run, "loss": self.loss, "steps": self.influence.at, "occurrences": len(self.influence),
            "queries": results, "sources": self.sources.as_dict(), "timeline": self.timeline.as_dict(), "seconds": self.seconds,
        }  # fmt: skip


def text_demo(out: Path, *, progress: Progress | None = None, **args: Any) -> TextDemo:
    """Run the whole demo into the folder `out`; the recorded run is `out/run`. `args` are those of the recipe."""
    path, stages = prepare_folder(out / "run", RECIPE), Stages(progress)
    plan = recipe(**args)
    with stages.stage("train and record") as done:
        run = record_recipe(plan, path, done, checkpoints=CHECKPOINTS, recipe=RECIPE, recipe_args=args)
    used = [(str(i), text_of(x)) for ids, tokens in plan.batches for i, x in zip(ids, tokens, strict=True)]
    run.describe([i for i, _ in used], text=[x for _, x in used], source=[i.split("/")[0] for i, _ in used])
    for name, batch in plan.queries.items():
        run.add_queries(name, batch)
    with stages.stage("embed") as done:
        run.embed(progress=done)
    passages = plan.queries[TextDemo.queries]
    domains = {name: batch for name, batch in plan.queries.items() if name != TextDemo.queries}
    with stages.stage("query"):
        plain = run.query(plan.model, loss, passages)
        values = sources(run, plan.model, loss, domains)
    influence = replace(plain, caveats=(CAUTION, *plain.caveats))
    with torch.no_grad():
        unseen = torch.cat([loss(plan.model, batch) for batch in domains.values()])
    return TextDemo(
        run=str(path), loss=float(unseen.mean()) / (passages.shape[1] - 1), domains=list(domains),
        passages=[text_of(x) for x in passages], influence=influence, sources=values,
        timeline=timeline_of(run, influence.only("mean")), seconds=stages.seconds,
    )  # fmt: skip
