"""Trainings that a callback writes the recipe of, and the same as recipes written by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from tests.integrations.causal import order
from tests.integrations.modules import SIZE, Item
from tests.support.loops import generator
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
)

import backstory
from backstory.integrations.huggingface import BackstoryCallback

VOCABULARY, SAMPLES, BATCH, RATE, WARMUP, MAX_NORM = 19, 12, 3, 5e-3, 2, 1.0


def gpt(dropout: float = 0.0) -> nn.Module:
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    rates: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    torch.manual_seed(0)
    kind: Any = GPT2LMHeadModel
    model: nn.Module = kind(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0))
    return model


def bert() -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    more: dict[str, Any] = {"intermediate_size": 12, "max_position_embeddings": 8, "num_labels": 3, "pad_token_id": 0}
    rates: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    kind: Any = BertForSequenceClassification
    model: nn.Module = kind(BertConfig(**sizes, **more, **rates))
    return model


def texts() -> Tensor:
    return torch.randint(1, VOCABULARY, (SAMPLES, 6), generator=generator(4))


def items(kind: str) -> list[dict[str, Any]]:
    """Texts of one length; the first labels of a text have no loss, of some texts three, so that weights differ from a mean."""
    if kind == "bert":
        return [{"input_ids": x, "labels": i % 3} for i, x in enumerate(texts())]
    labels = texts()
    labels[::2, :3] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(texts(), labels, strict=True)]


def trainer(
    model: nn.Module, kind: str, run: Path, *, accumulate: int = 1, record: dict[str, Any] | None = None, **more: Any
) -> Any:
    """A Trainer that records `model` into `run`, with AdamW, clipping and a warm-up."""
    chosen: dict[str, Any] = {
        "per_device_train_batch_size": BATCH, "num_train_epochs": 2, "learning_rate": RATE, "max_grad_norm": MAX_NORM,
        "warmup_steps": WARMUP, "gradient_accumulation_steps": accumulate, "weight_decay": 0.1, "save_strategy": "no",
        "report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no",
    }  # fmt: skip
    reduction = "mean" if kind == "bert" else "token-mean"
    settings: dict[str, Any] = {"queries": {"q": items(kind)[:2]}, "rank": 2, **(record or {})}
    recording = BackstoryCallback(run, loss_reduction=reduction, **settings)
    callbacks = [recording, *more.pop("callbacks", [])]
    arguments = TrainingArguments(str(run) + "-out", **{**chosen, **more})
    return Trainer(model, arguments, train_dataset=items(kind), callbacks=callbacks)


def collated(kind: str, ids: list[int]) -> dict[str, Tensor]:
    chosen = [items(kind)[i] for i in ids]
    return {k: torch.stack([torch.as_tensor(x[k]) for x in chosen]) for k in ("input_ids", "labels")}


def text_losses(kind: str, model: Any, batch: dict[str, Tensor]) -> Tensor:
    """−log p of each sample, looked up in log-softmax: written without the losses of the package or of transformers."""
    out = torch.log_softmax(model(input_ids=batch["input_ids"]).logits, -1)
    if kind == "bert":
        return -out.gather(1, batch["labels"][:, None])[:, 0]
    labels = batch["labels"][:, 1:]
    picked = out[:, :-1].gather(2, labels.clamp_min(0)[..., None])[..., 0]
    return -(picked * (labels >= 0)).sum(1)


def by_hand(
    kind: str, model: Callable[[], nn.Module], run: Path, accumulate: int = 1
) -> Callable[[], backstory.Recipe]:
    """The same training as a recipe: samples looked up by id, rates and decayed parameters written out."""
    steps = order(run)

    def recipe() -> backstory.Recipe:
        made = model()
        plain = [
            p for name, p in made.named_parameters() if name.endswith("bias") or ".ln_" in name or "LayerNorm" in name
        ]
        rest = [p for p in made.parameters() if all(p is not q for q in plain)]
        groups = [{"params": rest, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=RATE)

        def rate(t: int) -> float:
            return t / WARMUP if t < WARMUP else max(0.0, (len(steps) - t) / (len(steps) - WARMUP))

        def counted(t: int) -> Tensor:
            labels = collated(kind, steps[t])["labels"]
            terms = (
                len(labels) if kind == "bert" else int((labels >= 0).sum())
            )  # the Trainer counts the first label too
            return torch.full((len(labels),), 1.0 / terms, dtype=torch.float64)

        return backstory.Recipe(
            model=made, optimizer=optimizer, loss=lambda m, b: text_losses(kind, m, b), clip_norm=MAX_NORM,
            batches=[(ids, collated(kind, ids)) for ids in steps], loss_reduction="weights", weights=counted,
            schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, rate), queries={"q": collated(kind, [0, 1])},
        )  # fmt: skip

    return recipe


class Classifier(LightningModule):  # type: ignore[misc]
    """A small net with a dropout, a logged loss, and a schedule."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 3))

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0].float()), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Sampled(Classifier):
    """With a method that gives the losses of samples."""

    def sample_losses(self, batch: Item) -> Tensor:
        return F.cross_entropy(self.net(batch[0].float()), batch[1], reduction="none")


class Centred(Classifier):
    """Its loss depends on all samples of a batch together."""

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        logits = self.net(batch[0].float())
        return F.cross_entropy(logits - logits.mean(0), batch[1])


class Attached(Classifier):
    """Uses its Trainer."""

    def training_step(self, batch: Item, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx) * (1 + 0 * self.trainer.max_epochs)
        return loss


def net_by_hand(run: Path, data: Any, max_norm: float) -> Callable[[], backstory.Recipe]:
    """The training of `Classifier(4)` as a recipe."""
    steps = order(run)

    def recipe() -> backstory.Recipe:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)

        def put(ids: list[int]) -> tuple[Tensor, Tensor]:
            return torch.stack([data[i][0] for i in ids]).float(), torch.stack([data[i][1] for i in ids])

        def losses(m: Any, batch: Any) -> Tensor:
            return -torch.log_softmax(m(batch[0]), -1).gather(1, batch[1][:, None])[:, 0]

        return backstory.Recipe(
            model=model, optimizer=optimizer, loss=losses, batches=[(ids, put(ids)) for ids in steps],
            clip_norm=max_norm, schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.9**t),
            queries={"q": put(list(range(SIZE)))},
        )  # fmt: skip

    return recipe
