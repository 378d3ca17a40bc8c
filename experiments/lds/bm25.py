r"""BM25 over words: which texts share rare words with a query. It knows neither model nor training.

    score(q, d) = Σ_{w ∈ q} ln(1 + (N − n_w + ½)/(n_w + ½)) · f_w (k + 1) / (f_w + k (1 − b + b |d|/mean |d|))

with f_w how often the word w stands in d, and n_w in how many of the N texts it stands.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

K, B = 1.5, 0.75
WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    """Words in small letters."""
    return WORD.findall(text.lower())


def bm25(queries: Sequence[str], texts: Sequence[str]) -> Tensor:
    """Scores (queries, texts), float64."""
    counts = [Counter(words(text)) for text in texts]
    sizes = [sum(count.values()) for count in counts]
    mean = max(1.0, sum(sizes) / len(sizes))
    found = Counter(word for count in counts for word in count)
    rare = {word: math.log(1 + (len(texts) - n + 0.5) / (n + 0.5)) for word, n in found.items()}

    def score(query: Counter[str], count: Counter[str], size: int) -> float:
        long = K * (1 - B + B * size / mean)
        return sum(n * rare[w] * count[w] * (K + 1) / (count[w] + long) for w, n in query.items() if w in count)

    asked = [Counter(words(query)) for query in queries]
    return torch.tensor(
        [[score(q, c, size) for c, size in zip(counts, sizes, strict=True)] for q in asked], dtype=torch.float64
    )
