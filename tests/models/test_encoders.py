"""BERT, RoBERTa, DistilBERT, ViT and attention written by hand, whose key biases have a gradient of exactly 0.

Softmax does not see what is added to all keys alike, so that the gradient of their bias is 0 for each sample: rounding
noise, in the recorded rows and in torch's own gradient. Everything else against one backward pass per sample.
"""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.models.language import kept, shaken
from tests.support.loops import generator
from tests.support.oracles import assert_close
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import backstory
from backstory.integrations.huggingface import BackstoryCallback

WORDS = 23
SAMPLES = 4
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
TEXT: dict[str, Any] = {**SIZES, "vocab_size": WORDS, "max_position_embeddings": 16, "pad_token_id": 1}
DISTIL: dict[str, Any] = {
    "vocab_size": WORDS,
    "max_position_embeddings": 16,
    "dim": 8,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 12,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "seq_classif_dropout": 0.0,
}
Inputs = dict[str, Tensor]


class ByHand(nn.Module):
    """One layer of attention with q, k and v apart, as in many a course."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.q, self.k, self.v, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.words(input_ids)
        seen = (self.q(h) @ self.k(h).mT / 8**0.5).softmax(-1) @ self.v(h)
        out: Tensor = self.out(h + seen).mean(1)
        return out


def built(kind: Any, config: Any, **sizes: Any) -> nn.Module:
    model: nn.Module = kind(config(**sizes))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "BERT": lambda: built(BertForSequenceClassification, BertConfig, **TEXT),
    "RoBERTa": lambda: built(RobertaForSequenceClassification, RobertaConfig, **TEXT),
    "DistilBERT": lambda: built(DistilBertForSequenceClassification, DistilBertConfig, **DISTIL),
    "ViT": lambda: built(ViTForImageClassification, ViTConfig, **SIZES, image_size=8, patch_size=4),
    "by hand": ByHand,
}
BARE = ["!vit.embeddings.cls_token", "!vit.embeddings.position_embeddings"]  # parameters that no layer owns


def batch(name: str, dtype: torch.dtype, seed: int = 0) -> tuple[Inputs, Tensor]:
    labels = torch.arange(SAMPLES) % 2
    if name == "ViT":
        return {"pixel_values": torch.randn(SAMPLES, 3, 8, 8, generator=generator(seed), dtype=dtype)}, labels
    return {"input_ids": torch.randint(2, WORDS, (SAMPLES, 6), generator=generator(seed))}, labels


def losses(model: nn.Module, inputs: Inputs, labels: Tensor) -> Tensor:
    out = model(**inputs)
    return F.cross_entropy(out if isinstance(out, Tensor) else out.logits, labels, reduction="none")


def one_backward_each(model: nn.Module, inputs: Inputs, labels: Tensor, names: list[str]) -> Tensor:
    twin, rows = copy.deepcopy(model), []
    parameters = dict(twin.named_parameters())
    for i in range(SAMPLES):
        twin.zero_grad()
        losses(twin, {k: x[i : i + 1] for k, x in inputs.items()}, labels[i : i + 1]).sum().backward()
        grads = [parameters[n].grad for n in names]
        rows.append(
            torch.cat(
                [
                    torch.zeros(parameters[n].numel()) if g is None else g.flatten()
                    for n, g in zip(names, grads, strict=True)
                ]
            )
        )
    return torch.stack(rows)


def train(path: Path, model: nn.Module, name: str, dtype: torch.dtype, **settings: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layers = BARE if name == "ViT" else None
    with backstory.record(model, optimizer, path, loss_reduction="mean", layers=layers, **settings) as rec:
        for t in range(3):
            optimizer.zero_grad()
            with rec.step([f"{t}-{i}" for i in range(SAMPLES)], tokens=[1] * SAMPLES):
                losses(model, *batch(name, dtype, t)).mean().backward()
                optimizer.step()


@pytest.mark.parametrize("name", MODELS)
def test_rows_are_those_of_one_backward_per_sample(name: str, tmp_path: Path) -> None:
    model = shaken(MODELS[name]().double())
    twin, inputs = copy.deepcopy(model), batch(name, torch.float64)
    train(tmp_path / "run", model, name, torch.float64, projection="full", encoding="float64")
    actual = kept(tmp_path / "run")
    keys = [n for n in actual.names if n.endswith(("key.bias", "k_lin.bias", "k_proj.bias", "k.bias"))]
    assert keys, "no parameter of this model has a gradient of 0, so this test shows nothing"
    expected = one_backward_each(twin, *inputs, actual.names)
    assert_close(actual.rows[:SAMPLES], expected, 1e-9)
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    parts = dict(zip(actual.names, actual.rows.split([sizes[n] for n in actual.names], 1), strict=True))
    assert max(float(parts[n].abs().max()) for n in keys) < 1e-12 * float(actual.rows.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_records_at_its_defaults_as_it_is_initialised(name: str, tmp_path: Path) -> None:
    """In float32, where what is left of a sum of 0 is as large as rounding makes it."""
    torch.manual_seed(1)
    train(tmp_path / "run", MODELS[name](), name, torch.float32)
    assert backstory.open(tmp_path / "run").n_steps == 3


@pytest.mark.parametrize("name", ["BERT", "by hand"])
def test_records_in_half_precision(name: str, tmp_path: Path) -> None:
    model = shaken(MODELS[name]())
    with torch.autocast("cpu", torch.bfloat16):
        train(tmp_path / "run", model, name, torch.float32)
    assert backstory.open(tmp_path / "run").n_steps == 3


def test_the_trainer_of_hugging_face_records_bert(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, (inputs, labels) = MODELS["BERT"](), batch("BERT", torch.float32)
    data = [{"input_ids": x, "labels": y} for x, y in zip(inputs["input_ids"], labels, strict=True)]
    settings = TrainingArguments(
        str(tmp_path / "out"), per_device_train_batch_size=2, max_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    Trainer(
        model, settings, train_dataset=data, callbacks=[BackstoryCallback(tmp_path / "run", loss_reduction="mean")]
    ).train()
    assert backstory.open(tmp_path / "run").n_steps == 2
