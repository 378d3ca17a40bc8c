"""The run on disk: what is recorded, how it is stored and read back."""

from .run_store import RunStore
from .schema import RowBlock, StepRecord, StepTable
from .writer import Writer

__all__ = ["RowBlock", "RunStore", "StepRecord", "StepTable", "Writer"]
