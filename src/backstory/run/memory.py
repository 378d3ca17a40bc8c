"""A cache of a run's embeddings in memory, for a service that runs many queries at the same steps.

`Run.load_embeddings(at)` fills it; queries at that step then read nothing from disk, and say the same. Threads that read
one run share its memory: each opens the run for itself (`Run.reopen`), for two threads cannot read one table at once.

Shapes:  N occurrences before the step, p dimensions.
"""

from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..results.influence import SampleIndex
from ..store import RunStore


class Embedded(NamedTuple):
    """The embeddings of one step, and whose they are."""

    settings: Mapping[str, Any]  # that they were made with: after another `embed` they are not the run's any more
    E: Tensor  # (N, p) float32
    samples: np.ndarray[Any, Any]  # (N,) ids as text
    steps: np.ndarray[Any, Any]  # (N,)
    sample_index: SampleIndex


class Memory:
    """Embeddings by step; any number of threads read them."""

    def __init__(self) -> None:
        self._embedded: dict[int, Embedded] = {}
        self._lock = Lock()

    def load(self, store: RunStore, at: int, room: int | None = None) -> bool:
        """Whether the embeddings of `at` are in memory now: stored, and of at most `room` bytes."""
        settings = store.embeddings().get(at)
        if settings is None or (room is not None and embedding_bytes(store, at) > room):
            return False
        if self.get(store, at) is None:
            n = store.rows_before(at)
            E = store.read_embeddings(at, 0, n).float().contiguous()
            samples, steps = store.occurrences(n)
            index = SampleIndex(*np.unique(samples, return_inverse=True))
            with self._lock:
                self._embedded[at] = Embedded(settings, E, samples, steps, index)
        return True

    def get(self, store: RunStore, at: int) -> Embedded | None:
        """The embeddings of `at` if they are here, and still those of the run."""
        with self._lock:
            embedded = self._embedded.get(at)
        return embedded if embedded is not None and embedded.settings == store.embeddings().get(at) else None

    def drop(self, at: int) -> None:
        """Forget the embeddings of a step."""
        with self._lock:
            self._embedded.pop(at, None)


def embedding_bytes(store: RunStore, at: int) -> int:
    """How much memory the embeddings of a step take."""
    return 4 * store.width * store.rows_before(at)
