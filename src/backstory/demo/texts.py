"""The demo on text: a small GPT, pretrained and then fine-tuned on passages of eight domains; the fine-tuning is recorded by default.

AdamW, as the paper trains its language models. Passages of one length, each used once, as many of each domain; other passages of each
domain are the queries. What the run begins from is `pretrained`'s. The fine-tuning trains the token embeddings and the output layer
and leaves the blocks as they are: products of whole gradients tell the domains of typed texts apart best in these two layers.

What a projection loses of such products decides how often a typed text finds its domain. So no two tokens share a coordinate, and the run has
too many coordinates for embeddings: queries are answered by a reverse sweep. The learning rate is constant after the warm-up, so that no
passage counts for less because of its place.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

from ..insight.sources import Sources, sources
from ..insight.timeline import Timeline, timeline_of
from ..replay.recipe import Presentation, Recipe
from ..results.influence import Influence
from .data.typed import encode_text, pieces, show_queries, text_of
from .gpt_model import loss
from .pretrained import Beginning, TextSetup, load_beginning, make_beginning, plan_training
from .stages import Progress, Stages, prepare_folder, record_recipe

RECIPE = "backstory.demo.texts:recipe"
LEARNING_RATE, FLAT = 3e-4, 1.0  # after the warm-up, and the part of it that the last step has: all of it
CHECKPOINTS = 4
TOP = 3  # passages at either end of a result
FINE_TUNED = ("tokens", "head")
SETTINGS: dict[str, Any] = {
    "projection": "random",
    "rank": {"*": (2048, 8)},  # every token × few of the hidden units
    "curvature": "empirical/2",
    "encoding": "int8",
}


def recipe(sha256: str | None = None, **args: Any) -> Recipe:
    """Model, optimizer, schedule, loss and batches of `TextSetup(**args)`; `sha256` is that of the file that the run begins from."""
    setup = TextSetup(**args)
    return plan_of(setup, make_beginning(setup, Stages(None)) if sha256 is None else load_beginning(setup, sha256))


def plan_of(setup: TextSetup, beginning: Beginning) -> Recipe:
    """The fine-tuning that follows from a beginning."""
    model = beginning.model(setup)
    for name, part in model.named_children():
        part.requires_grad_(name in FINE_TUNED)
    plan = plan_training(setup, model, beginning.ids, beginning.passages, LEARNING_RATE, FLAT)
    words, domains = beginning.tokenizer, zip(beginning.domains, beginning.queries, strict=True)
    return replace(
        plan,
        queries={TextDemo.queries: beginning.queries[:, 0].clone(), **dict(domains)},
        page=Presentation(
            text=partial(encode_text, tokenizer=words, length=setup.length),
            show=partial(show_queries, tokenizer=words),
            pieces=partial(pieces, tokenizer=words),
        ),
    )


def scope(setup: TextSetup) -> str:
    """What the results speak of, and what they leave out."""
    return (
        f"Only the fine-tuning is recorded: {setup.steps * setup.batch_size:,} passages. It trains the token embeddings and the output layer, "
        "and leaves the other layers as they are. The model was pretrained on "
        f"{setup.pretraining * setup.batch_size:,} other passages of the same sources, which no result includes."
    )


@dataclass(frozen=True)
class TextDemo:
    """The run that the demo leaves, and its results on one unseen passage of each domain."""

    run: str
    setup: TextSetup
    before: float  # nats a token on unseen passages, before the fine-tuning
    loss: float  # and after it
    domains: list[str]
    passages: list[str]  # the query of each domain
    influence: Influence
    sources: Sources  # on all unseen passages
    timeline: Timeline
    seconds: dict[str, float]
    recipe: ClassVar[str] = RECIPE
    queries: ClassVar[str] = "passages"  # the query set that the run stores

    @property
    def scope(self) -> str:
        """What the results speak of."""
        return scope(self.setup)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        results = [
            {"domain": domain, "text": text, **self.influence.as_dict(top=TOP, query=k)}
            for k, (domain, text) in enumerate(zip(self.domains, self.passages, strict=True))
        ]
        return {
            "run": self.run, "setup": asdict(self.setup), "scope": self.scope, "loss_before": self.before, "loss": self.loss,
            "steps": self.influence.at, "occurrences": len(self.influence), "queries": results,
            "sources": self.sources.as_dict(), "timeline": self.timeline.as_dict(), "seconds": self.seconds,
        }  # fmt: skip


def text_demo(out: Path, *, progress: Progress | None = None, **args: Any) -> TextDemo:
    """Run the whole demo into the folder `out`; the recorded run is `out/run`. `args` are those of `TextSetup`."""
    path, stages, setup = prepare_folder(out / "run", RECIPE), Stages(progress), TextSetup(**args)
    beginning = make_beginning(setup, stages)
    plan, words = plan_of(setup, beginning), beginning.tokenizer
    before = _unseen(plan, beginning)
    with stages.stage("fine-tune and record") as done:
        stored = {**args, "sha256": beginning.sha256}
        run = record_recipe(plan, path, done, checkpoints=CHECKPOINTS, recipe=RECIPE, recipe_args=stored, **SETTINGS)
    texts = [text_of(x, words) for x in beginning.passages]
    run.describe(beginning.ids, text=texts, source=[i.split("/")[0] for i in beginning.ids])
    for name, batch in plan.queries.items():
        run.add_queries(name, batch)
    passages = plan.queries[TextDemo.queries]
    with stages.stage("query"):
        influence = run.query(plan.model, loss, passages)
        values = sources(run, plan.model, loss, {name: plan.queries[name] for name in beginning.domains})
    return TextDemo(
        run=str(path), setup=setup, before=before, loss=_unseen(plan, beginning), domains=beginning.domains,
        passages=[text_of(x, words) for x in passages], influence=influence, sources=values,
        timeline=timeline_of(run, influence.only("mean")), seconds=stages.seconds,
    )  # fmt: skip


def _unseen(plan: Recipe, beginning: Beginning) -> float:
    """The model's loss on the unseen passages, nats a token."""
    tokens = beginning.queries.flatten(0, 1)
    with torch.no_grad():
        return float(loss(plan.model, tokens).mean()) / (tokens.shape[1] - 1)
