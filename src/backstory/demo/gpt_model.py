"""A GPT in the plain style: pre-norm blocks, learned positions, no dropout, its head apart from its embedding; its losses, and AdamW's settings."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0  # of AdamW, and the norm that gradients are clipped to
WARMUP, FLOOR = 0.1, 0.1  # parts of the steps, and of the learning rate at the end


class Block(nn.Module):
    """Attention and a feed-forward network, each behind a LayerNorm, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, width) -> the same."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, S, width / heads)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        down: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + down


class GPT(nn.Module):
    """Tokens to the next token's logits."""

    def __init__(self, *, vocabulary: int, length: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02 if name in ("tokens.weight", "positions.weight") else p.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S) -> (B, S, vocabulary)."""
        places = torch.arange(x.shape[1], device=x.device)[None]
        h = self.tokens(x) + self.positions(places)
        for block in self.blocks:
            h = block(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of each next token: (B, S + 1) -> (B, S)."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none").reshape(len(tokens), -1)


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """The sum over each sequence's tokens: (B,)."""
    return token_losses(model, tokens).sum(1)


def counts(tokens: Tensor) -> Tensor:
    """Tokens of each sequence that have a loss."""
    return torch.full((len(tokens),), tokens.shape[1] - 1)


def warmup_cosine(t: int, total: int, warmup: float = WARMUP, floor: float = FLOOR) -> float:
    """Part of the learning rate at step t: warm-up over that part of the steps, then a cosine down to `floor`."""
    warm = max(1, round(warmup * total))
    done = max(0, t - warm) / max(1, total - warm)
    return min(1.0, (t + 1) / warm) * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done)))
