"""Insight results in a notebook: their table, the sign, and their notes. `.figure()` is a Plotly object of its own."""

from typing import Any

from ..errors import BackstoryError
from ..results.notebook import shown
from .asking import SIGN


class InNotebook:
    """A result that shows itself; it has `to_pandas()` and `notes`."""

    notes: tuple[str, ...] = ()

    def to_pandas(self) -> Any:
        """A DataFrame."""
        raise NotImplementedError

    @property
    def headline(self) -> str:
        """What stands above the table."""
        return type(self).__name__

    @property
    def said(self) -> tuple[str, ...]:
        """What must be said with it."""
        return SIGN, *self.notes

    def _repr_html_(self) -> str | None:
        try:
            table = self.to_pandas()
        except BackstoryError:  # pandas is not there: the notebook prints plain words
            return None
        return shown(self.headline, table, self.said)
