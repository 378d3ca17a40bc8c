"""The answer to a question: the influence of training samples on queries, with its sign in words.

influence ≈ ℓ(without the sample) − ℓ(with it), in the units of the query's loss. Positive: the sample helped;
removing it would raise the query's loss.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..capture.ids import as_text, restore
from ..errors import UsageError
from .notebook import shown

SIGN = "positive: the sample helped, removing it would raise the query's loss; in the units of that loss"


@dataclass(frozen=True)
class Hit:
    """One sample, or one occurrence of it, and its influence on a query."""

    sample: int | str
    step: int  # where it was used; of a sample with several occurrences, where it mattered most
    influence: float
    occurrences: int = 1

    @property
    def words(self) -> str:
        """The sign in words."""
        if self.influence == 0:
            return "had no influence"
        return (
            "helped: without it the loss would be higher"
            if self.influence > 0
            else "hurt: without it the loss would be lower"
        )

    def __str__(self) -> str:
        return f"sample {self.sample}  {self.influence:+.5f}  at step {self.step}  {self.words}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**asdict(self), "words": self.words}


@dataclass(frozen=True)
class Influence:
    """Influences of occurrences on Q queries; `rows` says which occurrences of the run are held (all, or the best)."""

    scores: Tensor  # (Q, M) float64
    sample_ids: np.ndarray[Any, Any]  # (N,) or (Q, M) ids as text
    steps: np.ndarray[Any, Any]  # same shape
    id_kind: str
    at: int  # the step whose model was asked
    method: str  # "adjoint" or "embeddings"
    notes: tuple[str, ...] = ()
    complete: bool = True  # False: only the k best and worst occurrences of each query were kept
    lookup: Callable[[Sequence[str]], dict[str, dict[str, Any]]] | None = field(default=None, repr=False)
    quality: Mapping[str, Any] | None = field(default=None, repr=False)  # how far to trust it; `words` in plain English
    kept: int | None = None  # of how many best and how many worst `scores` consists; None: of all

    @property
    def n_queries(self) -> int:
        """How many queries were asked."""
        return self.scores.shape[0]

    def __len__(self) -> int:
        return self.scores.shape[1]

    def __repr__(self) -> str:
        notes = "".join(f"\n  {x}" for x in self.notes)
        return (
            f"Influence of {len(self):,} occurrences on {self.n_queries} queries at step {self.at}, by {self.method}\n"
            f"  {SIGN}{notes}"
        )

    def _repr_html_(self) -> str | None:
        try:
            import pandas as pd
        except ImportError:
            return None
        mean, per = self.complete and self.n_queries > 1, "sample" if self.complete else "occurrence"
        which: int | str = "mean" if mean else 0
        hits = dict.fromkeys([*self.top(5, query=which, per=per), *self.bottom(5, query=which, per=per)[::-1]])
        asked = f"the mean of {self.n_queries} queries" if mean else f"query 1 of {self.n_queries}"
        title = f"Influence of {len(self):,} occurrences on {asked}, on the model at step {self.at}, by {self.method}"
        return shown(title, pd.DataFrame([h.as_dict() for h in hits]), (SIGN, *self.notes))

    def top(self, k: int = 10, *, query: int | str | None = None, per: str = "sample") -> list[Hit]:
        """The k most helpful, highest first; per "sample" (its occurrences summed) or per "occurrence"."""
        return self._hits(k, query, per, largest=True)

    def bottom(self, k: int = 10, *, query: int | str | None = None, per: str = "sample") -> list[Hit]:
        """The k most harmful, lowest first."""
        return self._hits(k, query, per, largest=False)

    def sum_over(self, samples: Iterable[int | str], *, steps: Iterable[int] | None = None) -> Tensor:
        """Influence (Q,) of removing these samples together, at all their occurrences or only in `steps`.

        A first-order sum: it understates groups whose members stand in for each other.
        """
        self._need_all("sum_over()")
        wanted = set(as_text(samples)[0])
        unknown = wanted - set(self.sample_ids.tolist())
        if unknown:
            raise UsageError(
                f"{len(unknown)} of the samples never occurred before step {self.at}, e.g. {min(unknown)!r}."
            )
        keep = np.isin(self.sample_ids, list(wanted))
        if steps is not None:
            keep &= np.isin(self.steps, list(steps))
        return self.scores[:, torch.from_numpy(keep)].sum(1)

    def between(self, first: int, last: int) -> "Influence":
        """Only the occurrences of steps first … last−1, for example one epoch."""
        self._need_all("between()")
        keep = (self.steps >= first) & (self.steps < last)
        return replace(
            self,
            scores=self.scores[:, torch.from_numpy(keep)],
            sample_ids=self.sample_ids[keep],
            steps=self.steps[keep],
            notes=(*self.notes, f"steps {first} to {last - 1} only"),
        )

    def per_sample(self) -> tuple[list[int | str], Tensor]:
        """`(ids, influences (Q, ids))`: removal from all steps, occurrences summed."""
        self._need_all("per_sample()")
        names, inverse = np.unique(self.sample_ids, return_inverse=True)
        out = torch.zeros(self.n_queries, len(names), dtype=self.scores.dtype)
        out.index_add_(1, torch.from_numpy(inverse), self.scores)
        return restore(names.tolist(), self.id_kind), out

    def group_by(self, column: str) -> dict[str, Tensor]:
        """Summed influence (Q,) of each "source" or "label", highest mean first; needs content in the run."""
        self._need_all("group_by()")
        if column not in ("source", "label"):
            raise UsageError(f"found group_by({column!r}); expected 'source' or 'label'.")
        names, inverse = np.unique(self.sample_ids, return_inverse=True)
        content = self.lookup(names.tolist()) if self.lookup else {}
        of = [content.get(n, {}).get(column) for n in names]
        if all(x is None for x in of):
            raise UsageError(f"the run holds no {column} of its samples: give it with rec.describe(ids, {column}=…).")
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros(self.n_queries, dtype=self.scores.dtype))
        labels = np.array(["(not given)" if x is None else x for x in of])[inverse]
        for name in sorted(set(labels.tolist())):
            totals[name] = self.scores[:, torch.from_numpy(labels == name)].sum(1)
        return dict(sorted(totals.items(), key=lambda item: -float(item[1].mean())))

    def to_pandas(self) -> Any:
        """A DataFrame with one line for each query and occurrence."""
        try:
            import pandas as pd
        except ImportError as error:
            raise UsageError("to_pandas() needs pandas: pip install 'backstory[pandas]'.") from error

        q, m = self.scores.shape
        samples = self.sample_ids if self.sample_ids.ndim == 2 else np.broadcast_to(self.sample_ids, (q, m))
        steps = self.steps if self.steps.ndim == 2 else np.broadcast_to(self.steps, (q, m))
        return pd.DataFrame(
            {
                "query": np.repeat(np.arange(q), m),
                "sample": restore(samples.reshape(-1).tolist(), self.id_kind),
                "step": steps.reshape(-1),
                "influence": self.scores.reshape(-1).numpy(),
            }
        )

    def _hits(self, k: int, query: int | str | None, per: str, *, largest: bool) -> list[Hit]:
        if per not in ("sample", "occurrence") or k < 1:
            raise UsageError(f"found k={k}, per={per!r}; expected k ≥ 1 and per='sample' or 'occurrence'.")
        if not self.complete and per == "sample":
            raise UsageError(
                "only the best occurrences were kept (keep=); ask per='occurrence', or query without keep=."
            )
        scores, samples, steps = self._one_query(query)
        if per == "occurrence":
            held = len(scores) if self.kept is None else self.kept  # beyond it lies the other end
            order = torch.topk(scores, min(k, held, len(scores)), largest=largest).indices.tolist()
            ids = restore([str(samples[i]) for i in order], self.id_kind)
            return [Hit(s, int(steps[i]), float(scores[i])) for s, i in zip(ids, order, strict=True)]
        return self._sample_hits(k, scores, samples, steps, largest)

    def _sample_hits(self, k: int, scores: Tensor, samples: Any, steps: Any, largest: bool) -> list[Hit]:
        names, inverse, counts = np.unique(samples, return_inverse=True, return_counts=True)
        sums = torch.zeros(len(names), dtype=scores.dtype).index_add_(0, torch.from_numpy(inverse), scores)
        order = torch.topk(sums, min(k, len(names)), largest=largest).indices.tolist()
        hits = []
        for j in order:
            mine = np.flatnonzero(inverse == j)
            most = mine[int(scores[torch.from_numpy(mine)].abs().argmax())]
            name = restore([str(names[j])], self.id_kind)[0]
            hits.append(Hit(name, int(steps[most]), float(sums[j]), int(counts[j])))
        return hits

    def _one_query(self, query: int | str | None) -> tuple[Tensor, Any, Any]:
        if query is None and self.n_queries > 1:
            raise UsageError(
                f"{self.n_queries} queries were asked: pass query=0 … {self.n_queries - 1}, or query='mean'."
            )
        if query == "mean":
            self._need_all("query='mean'")
            return self.scores.mean(0), self.sample_ids, self.steps
        q = 0 if query is None else query
        if not isinstance(q, int) or not 0 <= q < self.n_queries:
            raise UsageError(f"found query={query!r}; expected 0 … {self.n_queries - 1}, or 'mean'.")
        if self.sample_ids.ndim == 2:
            return self.scores[q], self.sample_ids[q], self.steps[q]
        return self.scores[q], self.sample_ids, self.steps

    def _need_all(self, what: str) -> None:
        if not self.complete:
            raise UsageError(f"{what} needs all occurrences, but only the best were kept; query without keep=.")
