"""The run on disk: what is recorded, how it is kept, how it is read back."""

from .records import RowBlock, StepRecord, StepTable
from .run_store import RunStore
from .writer import Writer

__all__ = ["RowBlock", "RunStore", "StepRecord", "StepTable", "Writer"]
