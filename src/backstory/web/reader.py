"""A run that several threads read: an open run for each of them, for two threads cannot read one table of Lance at once."""

import threading
from pathlib import Path

from ..run.run import Run


class Reader:
    """Opens a run once for each thread that asks."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._own = threading.local()

    @property
    def run(self) -> Run:
        """This thread's open run."""
        found: Run | None = getattr(self._own, "run", None)
        if found is None:
            found = self._own.run = Run(self.path)
        return found
