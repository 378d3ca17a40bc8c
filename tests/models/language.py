"""Small language models without a download, one padded batch for them, and the slow truth about their rows.

The truth is one backward pass for each sample, on a copy without hooks; it shares no code with `backstory`.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.support.loops import generator
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import backstory
from backstory.store import RunStore

VOCABULARY = 23
LENGTHS = [7, 3, 4, 2, 5]  # 16 tokens have a loss: rounding to float32 inside a norm then commutes with the weight 1/16
PARTS = [[0, 1], [2], [3, 4]]  # micro-batches of unequal size
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
}


class Text(NamedTuple):
    """A padded batch; labels are −100 where there is no loss."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def part(self, chosen: Sequence[int]) -> "Text":
        return Text(*(x[list(chosen)] for x in self))

    @property
    def tokens(self) -> Tensor:
        """Loss terms of each sample: the first label is never predicted."""
        return (self.labels[:, 1:] != -100).sum(1)


class Nano(nn.Module):
    """A plain GPT as people write it by hand: positions looked up once, the head tied to the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 8), nn.Embedding(16, 8)
        self.blocks = nn.ModuleList([NanoBlock(), NanoBlock()])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        h = self.wte(input_ids) + self.wpe(torch.arange(input_ids.shape[1]))
        for block in self.blocks:
            h = block(h)
        out: Tensor = self.head(self.norm(h))
        return out


class NanoBlock(nn.Module):
    """Causal attention and a small perceptron; padding stands at the end, so that no token sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, h: Tensor) -> Tensor:
        B, S, _ = h.shape
        q, k, v = self.qkv(self.norm_1(h)).reshape(B, S, 3, 2, 4).permute(2, 0, 3, 1, 4)  # (B, heads, S, 4) each
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(seen.transpose(1, 2).reshape(B, S, 8))
        out: Tensor = h + self.mlp(self.norm_2(h))
        return out


def _built(kind: Any, config: Any, **sizes: Any) -> nn.Module:
    model: nn.Module = kind(config(**sizes, bos_token_id=0, eos_token_id=0))
    return model


def _gpt2() -> nn.Module:
    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return _built(
        GPT2LMHeadModel, GPT2Config, vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2, **rates
    )


def _llama(**more: Any) -> nn.Module:
    return _built(LlamaForCausalLM, LlamaConfig, **SIZES, num_key_value_heads=1, **more)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GPT-2": _gpt2,
    "GPT-NeoX": lambda: _built(GPTNeoXForCausalLM, GPTNeoXConfig, **SIZES),
    "Llama": _llama,
    "Llama, tied": lambda: _llama(tie_word_embeddings=True),
    "Qwen3": lambda: _built(Qwen3ForCausalLM, Qwen3Config, **SIZES, num_key_value_heads=1, head_dim=4),
    "Gemma2": lambda: _built(Gemma2ForCausalLM, Gemma2Config, **SIZES, num_key_value_heads=1, head_dim=4),
    "nanoGPT": Nano,
}


def shaken(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` with parameters that depend on `seed` alone, none of them 0 or 1."""
    for i, p in enumerate(model.parameters()):
        noise = torch.randn(p.shape, generator=generator(1000 * seed + i), dtype=torch.float64)
        p.data.copy_(0.3 * noise + (0.7 if p.dim() == 1 else 0.0))
    return model


def make(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    return shaken(MODELS[name]().to(dtype))


def text() -> Text:
    ids = torch.randint(0, VOCABULARY, (len(LENGTHS), max(LENGTHS)), generator=generator(3))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return Text(ids, mask, torch.where(mask.bool(), ids, -100))


def logits_of(model: nn.Module, batch: Text) -> Tensor:
    out = model(input_ids=batch.ids, attention_mask=batch.mask)
    logits: Tensor = out if isinstance(out, Tensor) else out.logits
    return logits


def token_losses(logits: Tensor, batch: Text) -> Tensor:
    """ℓ of each sample, the sum over its tokens (B,)."""
    wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide.transpose(1, 2), batch.labels[:, 1:], reduction="none").sum(1)


def one_backward_each(model: nn.Module, batch: Text) -> Tensor:
    """Rows (B, Σ numel) of the trained parameters, one forward and one backward pass of each sample alone."""
    twin = copy.deepcopy(model)
    rows = []
    for i in range(len(batch.ids)):
        twin.zero_grad()
        one = batch.part([i])
        token_losses(logits_of(twin, one), one).sum().backward()
        trained = [p for p in twin.parameters() if p.requires_grad]
        rows.append(torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in trained]))
    return torch.stack(rows)


class Kept(NamedTuple):
    """What a run holds."""

    rows: Tensor  # (N, Σp) float64
    weight: Tensor  # (N,)
    curvature: Tensor | None  # (N, K, Σp)
    names: list[str]
    clip: list[float]


def kept(path: Path) -> Kept:
    store = RunStore.open(path)
    block = store.read(0, store.n_rows(), dtype=torch.float64, curvature=True)
    assert block.rows is not None
    names = [b["name"] for b in store.config["blocks"]]
    return Kept(block.rows, block.weight, block.curvature, names, store.steps().clip.tolist())


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, **{"lr": 1e-3, "weight_decay": 0.1, **settings})


def train(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    steps: int = 2,
    outputs: bool = False,
    parts: Sequence[Sequence[int]] = PARTS,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    forward: nn.Module | None = None,
    truth: nn.Module | None = None,
    **settings: Any,
) -> tuple[Kept, Tensor]:
    """A recorded loop with a token-mean loss, accumulated over `parts`: what the run holds, and the true rows.

    `forward` is called in place of `model`, `truth` differentiated in place of it (it must share its parameters).
    """
    batch, expected = text(), []
    settings = {"loss_reduction": "token-mean", "projection": "full", "encoding": "float64", **settings}
    with backstory.record(model, optimizer, path, **settings) as rec:
        for t in range(steps):
            expected.append(one_backward_each(model if truth is None else truth, batch))
            optimizer.zero_grad()
            with rec.step() as s:
                for chosen in parts:
                    part = batch.part(chosen)
                    s.batch([f"{t}-{i}" for i in chosen], tokens=part.tokens)
                    with around():
                        logits = logits_of(model if forward is None else forward, part)
                        if outputs:
                            s.outputs(logits[:, :-1], "cross-entropy", mask=part.labels[:, 1:] != -100)
                        loss = token_losses(logits, part).sum() / batch.tokens.sum()
                    loss.backward()
                optimizer.step()
    return kept(path), torch.cat(expected).double()
