"""Backstory records a PyTorch training run once, and then tells for any prediction which training samples influenced it, and when."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import BackstoryError

if TYPE_CHECKING:
    from .capture import with_ids
    from .capture.modules import register
    from .capture.optimizers import register_optimizer
    from .recording import Recorder, Settings, record
    from .recording.plan import plan
    from .replay import Presentation, Recipe
    from .results import Influence
    from .run import Run
    from .run import open_run as open

HOMES = {  # of what is imported when it is first used, so that the command line starts without torch
    "Influence": ("results", "Influence"),
    "Presentation": ("replay", "Presentation"),
    "Recipe": ("replay", "Recipe"),
    "Recorder": ("recording", "Recorder"),
    "Run": ("run", "Run"),
    "Settings": ("recording", "Settings"),
    "open": ("run", "open_run"),
    "plan": ("recording.plan", "plan"),
    "record": ("recording", "record"),
    "register": ("capture.modules", "register"),
    "register_optimizer": ("capture.optimizers", "register_optimizer"),
    "with_ids": ("capture", "with_ids"),
}

__all__ = [
    "BackstoryError",
    "Influence",
    "Presentation",
    "Recipe",
    "Recorder",
    "Run",
    "Settings",
    "__version__",
    "open",
    "plan",
    "record",
    "register",
    "register_optimizer",
    "with_ids",
]


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module 'backstory' has no attribute {name!r}")
    room, there = HOMES[name]
    value = globals()[name] = getattr(import_module(f".{room}", __name__), there)
    return value


def __dir__() -> list[str]:
    return __all__
