"""Where the text demo's run begins: a small GPT pretrained on the eight domains, its tokens, and the passages that are to come.

All of it is drawn from one seed and lies in one file of the cache, `text-demo/NAME.safetensors` (NAME follows from the settings), so that
a recipe need not read the corpus and pretrain again. A run names its file by SHA-256.
Documents are cut into passages of one length. Every domain gives as many as any other, to within one: first queries, then the passages
of the recorded training, then those of the pretraining. No passage is used twice.

Shapes:  D domains, N passages of the recorded training, S tokens that have a loss.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from ..errors import UsageError
from ..replay.recipe import Recipe, take_step
from .data import DataError, Document, Pieces, Sequences, cache_dir, corpus, cut, mend
from .data.domains import SOURCES, mix
from .data.fetch import check, keep
from .gpt_model import BETAS, CLIP, DECAY, GPT, counts, loss, warmup_cosine
from .stages import StageProgress, Stages

FOLDER, FORM = "text-demo", 3  # the number changes whenever the same settings would give another file
QUERIES = 16  # passages of each domain for queries
PRETRAINING_RATE = 3e-3  # the highest
WARMUP, END = 0.05, 0.05  # the part of the steps that leads to it, and its part at the end
WORDS = "words"  # the key of what the file has beside its tensors
JOINED = {"law": ["law", "court-opinions"]}  # a domain of several sources: law is more than licences
WHOLE = 1 << 40  # bytes: every document of a source
LEARNED_FROM = 20_000  # characters of each document that the pieces are learned from
AGAIN = "Run `backstory demo text` again: on the same machine it makes the same file."


@dataclass(frozen=True, kw_only=True)
class TextSetup:
    """Sizes of the text demo; the recorded training is a fine-tuning of `steps` steps after `pretraining` steps."""

    steps: int = 200
    pretraining: int = 1700
    batch_size: int = 16
    length: int = 64  # tokens that have a loss
    layers: int = 3
    width: int = 128
    vocabulary: int = 2048
    megabytes: float = 1.2  # of each domain
    seed: int = 0

    @property
    def file(self) -> Path:
        """Where the beginning of this run lies."""
        key = json.dumps([FORM, asdict(self)], sort_keys=True).encode()
        return cache_dir() / FOLDER / f"{hashlib.sha256(key).hexdigest()[:16]}.safetensors"


@dataclass(frozen=True)
class Beginning:
    """What a run of the text demo starts from."""

    weights: dict[str, Tensor]
    tokenizer: Pieces
    ids: list[str]  # source/document/offset
    passages: Tensor  # (N, S + 1)
    domains: list[str]
    queries: Tensor  # (D, QUERIES, S + 1)
    sha256: str  # of its file

    def model(self, setup: TextSetup) -> GPT:
        """The pretrained model."""
        model = empty_model(setup, self.tokenizer)
        model.load_state_dict(self.weights)
        return model


def empty_model(setup: TextSetup, tokenizer: Pieces) -> GPT:
    """A model before its pretraining."""
    with torch.random.fork_rng():
        torch.manual_seed(setup.seed)
        return GPT(vocabulary=tokenizer.size, length=setup.length, layers=setup.layers, width=setup.width, heads=4)


def load_beginning(setup: TextSetup, sha256: str) -> Beginning:
    """The beginning of a run that was made before."""
    if not setup.file.is_file():
        raise DataError(f"{setup.file}, which this run of the text demo starts from, does not exist. {AGAIN}")
    data = setup.file.read_bytes()
    check(str(setup.file), data, sha256, f"The run was made from another one. {AGAIN}")
    return _read(data, sha256)


def make_beginning(setup: TextSetup, stages: Stages) -> Beginning:
    """The same, pretrained now unless the cache has it."""
    if not setup.file.is_file():
        with stages.stage("read text") as progress:
            documents = read_documents(setup, progress)
            tokenizer = Pieces.learn((d.text[:LEARNED_FROM] for d in documents), setup.vocabulary)
            pool = cut(documents, tokenizer, setup.length + 1)
        with stages.stage("pretrain") as progress:
            keep(setup.file, _written(setup, tokenizer, pool, progress))
    data = setup.file.read_bytes()
    return _read(data, hashlib.sha256(data).hexdigest())


def read_documents(setup: TextSetup, progress: StageProgress) -> list[Document]:
    """Documents of every domain, with broken encodings mended."""
    out: list[Document] = []
    limit = round(setup.megabytes * 1e6)
    for n, name in enumerate(SOURCES):
        several = JOINED.get(name)
        found = corpus([name], limit) if several is None else mix(corpus(several, WHOLE), name, limit)
        out += [d._replace(text=mend(d.text)) for d in found]
        progress(n + 1, len(SOURCES))
    return out


def _written(setup: TextSetup, tokenizer: Pieces, pool: Sequences, progress: StageProgress) -> bytes:
    """The file of a beginning, after its pretraining."""
    queries, training, pretraining = share_out(setup, pool)
    model = empty_model(setup, tokenizer)
    pretrain(setup, model, pool.tokens[pretraining], progress)
    words = {
        "tokenizer": tokenizer.as_json,
        "ids": [pool.ids[i] for i in training],
        "domains": sorted(set(pool.sources)),
    }
    weights = {f"model.{name}": x.contiguous() for name, x in model.state_dict().items()}
    return save(
        {**weights, "passages": pool.tokens[training], "queries": pool.tokens[queries]},
        metadata={WORDS: json.dumps(words)},
    )  # several would be written in random order


def share_out(setup: TextSetup, pool: Sequences) -> tuple[Tensor, list[int], list[int]]:
    """`(queries (D, QUERIES), training, pretraining)`: places in the pool, drawn by the seed."""
    g = torch.Generator().manual_seed(setup.seed)
    order = torch.randperm(len(pool.ids), generator=g).tolist()
    domains = sorted(set(pool.sources))
    of = {name: [i for i in order if pool.sources[i] == name] for name in domains}
    wanted = [_evenly(n * setup.batch_size, len(domains)) for n in (setup.steps, setup.pretraining)]
    queries, training, pretraining = [], list[int](), list[int]()
    for name, n, before in zip(domains, *wanted, strict=True):
        if len(of[name]) < QUERIES + n + before:
            raise UsageError(
                f"the corpus is too small: {name} has {len(of[name]):,} passages, and this run needs {QUERIES + n + before:,}. "
                "Use fewer steps, or more megabytes."
            )
        queries.append(of[name][:QUERIES])
        training += of[name][QUERIES : QUERIES + n]
        pretraining += of[name][QUERIES + n : QUERIES + n + before]
    return torch.tensor(queries), _shuffled(training, g), _shuffled(pretraining, g)


def _evenly(total: int, parts: int) -> list[int]:
    return [total // parts + (k < total % parts) for k in range(parts)]


def _shuffled(values: Sequence[int], g: torch.Generator) -> list[int]:
    return [values[k] for k in torch.randperm(len(values), generator=g).tolist()]


def pretrain(setup: TextSetup, model: GPT, tokens: Tensor, progress: StageProgress) -> None:
    """Train the model on passages that are not recorded."""
    plan = plan_training(setup, model, [""] * len(tokens), tokens, PRETRAINING_RATE)
    for t in range(len(plan.batches)):
        take_step(plan, t)
        progress(t + 1, len(plan.batches))


def plan_training(
    setup: TextSetup, model: GPT, ids: Sequence[str], tokens: Tensor, rate: float, end: float = END
) -> Recipe:
    """AdamW with warm-up and cosine, down to the part `end` of the rate, over these passages, each used once."""
    size, steps = setup.batch_size, -(-len(tokens) // setup.batch_size)
    optimizer = torch.optim.AdamW(
        (p for p in model.parameters() if p.requires_grad), lr=rate, betas=BETAS, weight_decay=DECAY
    )
    return Recipe(
        model=model, optimizer=optimizer, loss=loss, loss_reduction="token-mean", tokens=counts, clip_norm=CLIP,
        batches=[(list(ids[t * size : (t + 1) * size]), part) for t, part in enumerate(tokens.split(size))],
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: warmup_cosine(t, steps, WARMUP, end)),
    )  # fmt: skip


def _read(data: bytes, sha256: str) -> Beginning:
    tensors = load(data)
    words = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"][WORDS])
    weights = {name.removeprefix("model."): x for name, x in tensors.items() if name.startswith("model.")}
    return Beginning(
        weights, Pieces(words["tokenizer"]), words["ids"], tensors["passages"],
        words["domains"], tensors["queries"], sha256,
    )  # fmt: skip
