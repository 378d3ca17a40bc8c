"""From what a person types to tokens, and from tokens to what a person reads."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...errors import UsageError
from .tokens import Tokenizer, decode


def encode_text(text: str, tokenizer: Tokenizer, length: int) -> Tensor:
    """A text as sequences of at most `length` + 1 tokens; a long text is cut evenly, (n, ≤ length + 1)."""
    tokens = torch.tensor(tokenizer.encode(text), dtype=torch.int64)
    if len(tokens) < 2:
        raise UsageError(
            f"the text must have 2 or more tokens, since each token is predicted from those before it, got {len(tokens)}. "
            "Type a few words."
        )
    n = math.ceil((len(tokens) - 1) / length)  # each token but the first has a loss
    size = math.ceil((len(tokens) - 1) / n) + 1
    starts = [round(k * (len(tokens) - size) / max(1, n - 1)) for k in range(n)]
    return torch.stack([tokens[lo : lo + size] for lo in starts])


def text_of(tokens: Tensor, tokenizer: Tokenizer) -> str:
    """A passage as people read it."""
    return decode(tokens.tolist(), tokenizer)


def show_queries(tokens: Tensor, tokenizer: Tokenizer) -> list[dict[str, str]]:
    """What a person sees of queries."""
    return [{"text": text_of(x, tokenizer)} for x in tokens]


def pieces(tokens: Tensor, place: int, tokenizer: Tokenizer) -> Sequence[str]:
    """The text of each position of one sequence of a batch; a character of several tokens stands at its last one."""
    out, waiting = [], b""
    for part in tokenizer.spell(tokens[place][:-1].tolist()):
        waiting += part
        whole = _complete(waiting)
        out.append(whole)
        waiting = waiting[len(whole.encode()) :] if "\ufffd" not in whole else b""
    return out


def _complete(data: bytes) -> str:
    """The characters that the bytes begin with; bytes that can begin no character are replaced."""
    for cut in range(4):
        try:
            return data[: len(data) - cut].decode()
        except UnicodeDecodeError:
            continue
    return data.decode(errors="replace")
