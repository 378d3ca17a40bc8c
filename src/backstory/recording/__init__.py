"""Recording a training run: from the hooks of one step to rows on disk."""

from .from_checkpoints import record_checkpoints
from .plan import Plan, plan
from .recorder import Recorder
from .start import record

__all__ = ["Plan", "Recorder", "plan", "record", "record_checkpoints"]
