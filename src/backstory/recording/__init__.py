"""Recording a training run: from the hooks of one step to rows on disk."""

from .from_checkpoints import record_checkpoints
from .recorder import Recorder, record
from .settings import AutoRank, Empirical, Exact, GaussNewton, Sampled, Settings

__all__ = [
    "AutoRank",
    "Empirical",
    "Exact",
    "GaussNewton",
    "Recorder",
    "Sampled",
    "Settings",
    "record",
    "record_checkpoints",
]
