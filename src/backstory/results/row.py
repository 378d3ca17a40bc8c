"""Plain values, for JSON: of anything nested, and of the rows of results, which are sent as their fields and their properties."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import numpy as np
import torch


class Row:
    """A part of a result: a frozen dataclass whose fields and properties all are values to show."""

    @classmethod
    def columns(cls) -> list[str]:
        """The names of its fields, then of its properties."""
        inherited = [(name, x) for kind in reversed(cls.__mro__) for name, x in vars(kind).items()]
        made = dict.fromkeys(name for name, x in inherited if isinstance(x, property))
        return [*(f.name for f in fields(cls)), *made]  # type: ignore[arg-type]

    @classmethod
    def table(cls, rows: Iterable[Any]) -> dict[str, list[Any]]:
        """The same of some rows: a list for each column."""
        every = list(rows)
        return {name: [getattr(row, name) for row in every] for name in cls.columns()}

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {name: plain(getattr(self, name)) for name in self.columns()}


def plain(value: Any) -> Any:
    """Nested values as JSON has them: None for what is not a finite number."""
    if isinstance(value, np.ndarray | torch.Tensor):
        value = value.tolist()
    elif hasattr(value, "as_dict"):
        value = value.as_dict()
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
