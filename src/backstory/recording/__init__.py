"""Recording a training run: from the hooks of one step to rows on disk."""

from .from_checkpoints import record_checkpoints
from .recorder import Recorder
from .start import record

__all__ = ["Recorder", "record", "record_checkpoints"]
