"""A recorded run: opened, embedded, queried."""

from .run import Run, open_run

__all__ = ["Run", "open_run"]
