"""A small causal language model in `transformers.Trainer`, and the same training written by hand."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.loops import generator, same_numbers, stored
from tests.support.oracles import assert_same
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import backstory
from backstory.integrations.huggingface import BackstoryCallback

VOCABULARY, SAMPLES, SIZE, EPOCHS, MAX_NORM = 23, 22, 3, 2, 0.5
TERMS = VOCABULARY + 3 * SIZE * 8  # of a step: transformers sums over words, and tokens of up to 9 texts, in float32
FULL: dict[str, Any] = {"projection": "full", "encoding": "float64"}


def built(kind: Any, config: Any, **sizes: Any) -> nn.Module:
    """A model of these sizes in float64, so that two trainings agree to many digits; its parameters depend on nothing else."""
    model: nn.Module = kind(config(**sizes, bos_token_id=0, eos_token_id=0)).double()
    for i, p in enumerate(model.parameters()):
        p.data.copy_(0.2 * torch.randn(p.shape, generator=generator(i)) + (0.8 if p.dim() == 1 else 0.0))
    return model


def llama(kind: Any = LlamaForCausalLM, **more: Any) -> nn.Module:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    places = {"num_key_value_heads": 1, "max_position_embeddings": 16, "vocab_size": VOCABULARY}
    return built(kind, LlamaConfig, **sizes, **places, **more)


def make(kind: str = "Llama") -> nn.Module:
    if kind == "Llama":
        return llama()
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return built(GPT2LMHeadModel, GPT2Config, **sizes, **rates)


def texts(n: int = SAMPLES) -> list[dict[str, Any]]:
    """Sequences of 3 to 8 tokens, with a column that no model takes."""
    draw = generator(3)
    tokens = [torch.randint(1, VOCABULARY, (3 + i % 6,), generator=draw) for i in range(n)]
    return [{"input_ids": t, "remark": f"text {i}"} for i, t in enumerate(tokens)]


def collate(items: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded at the end; padding has no loss, and neither has the second token of a text."""
    width = max(len(x["input_ids"]) for x in items)
    rows = torch.stack([F.pad(x["input_ids"], (0, width - len(x["input_ids"])), value=0) for x in items])
    labels = torch.where(rows == 0, -100, rows)
    labels[:, 1] = -100
    return {"input_ids": rows, "attention_mask": (rows != 0).long(), "labels": labels}


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": SIZE, "num_train_epochs": EPOCHS, "learning_rate": 1e-2, "max_grad_norm": MAX_NORM,
        "lr_scheduler_type": "cosine", "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**chosen, **more})


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def trainer(
    folder: Path,
    run: Path | None,
    *,
    model: nn.Module | None = None,
    data: Any = None,
    callbacks: Sequence[Any] = (),
    record: dict[str, Any] | None = None,
    optimizer: Any = adamw,
    kind: Any = Trainer,
    collator: Any = collate,
    **more: Any,
) -> tuple[Any, Any]:
    """A Trainer that records into `run`."""
    model = make() if model is None else model
    settings = {"loss_reduction": "token-mean", **FULL, **(record or {})}
    recording = None if run is None else BackstoryCallback(run, **settings)
    made = kind(
        model,
        arguments(folder, **more),
        data_collator=collator,
        train_dataset=texts() if data is None else data,
        eval_dataset=texts()[:5],
        optimizers=(optimizer(model), None),
        callbacks=[*([] if recording is None else [recording]), *callbacks],
    )
    return made, recording


def same_training(a: Path, b: Path, steps: int) -> None:
    """Two recordings of one training."""
    same_numbers(stored(a), stored(b), steps * TERMS, torch.float32)


def same_rows(a: Path, b: Path, steps: int) -> None:
    """The same of rows alone, where other things differ."""
    assert_same(stored(a).rows, stored(b).rows, steps * TERMS, dtype=torch.float32)


def same_answers(a: nn.Module, b: nn.Module, steps: int) -> None:
    """Two models after one training, by their logits: what a weight is that has no effect, rounding and Adam decide."""
    batch = collate(texts())
    assert_same(a(**batch).logits, b(**batch).logits, steps * TERMS, dtype=torch.float32)


def order(run: Path) -> list[list[int]]:
    """The ids of each step, as the run has them."""
    actual = stored(run)
    steps: list[list[int]] = [[] for _ in range(len(actual.table.step))]
    for step, sample in zip(actual.step.tolist(), actual.samples, strict=True):
        steps[step].append(int(sample))
    return steps


def by_hand(
    run: Path, steps: Sequence[Sequence[int]], model: nn.Module, *, first_counts: bool = False, **settings: Any
) -> nn.Module:
    """The same training without a Trainer: samples looked up by id, a cosine schedule and clipping written out.

    `first_counts`: a Trainer counts the first label of a text among the items of a step, for models whose loss it does not know.
    """
    optimizer, data = adamw(model), texts()
    cosine = [0.5 * (1 + math.cos(math.pi * t / len(steps))) for t in range(len(steps) + 1)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: cosine[t])
    settings = {"loss_reduction": "token-mean", **FULL, **settings}
    with backstory.record(model, optimizer, run, **settings) as rec:
        for ids in steps:
            parts = [ids[i : i + SIZE] for i in range(0, len(ids), SIZE)]
            batches = [collate([data[i] for i in part]) for part in parts]
            tokens = [(b["labels"][:, 0 if first_counts else 1 :] != -100).sum(1) for b in batches]
            with rec.step() as s:
                for part, batch, n in zip(parts, batches, tokens, strict=True):
                    s.batch(part, tokens=n)
                    out = model(**batch, num_items_in_batch=torch.cat(tokens).sum())
                    s.losses(torch.stack([_loss(x, y) for x, y in zip(out.logits, batch["labels"], strict=True)]))
                    out.loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
                optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    return model


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """ℓ of one text: the sum over its tokens."""
    return F.cross_entropy(logits[:-1].detach(), labels[1:], reduction="sum")
