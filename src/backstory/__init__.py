"""Backstory records how a model was trained, once, and answers which training examples made it do that, and when."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__
from .errors import BackstoryError

if TYPE_CHECKING:
    from .capture import with_ids
    from .capture.blocks import register
    from .session import Influence, Recipe, Recorder, Run, record
    from .session import open_run as open
    from .session.plan import plan

HOMES = {  # of what is imported when it is first used, so that the command line starts without torch
    "Influence": ("session", "Influence"),
    "Recipe": ("session", "Recipe"),
    "Recorder": ("session", "Recorder"),
    "Run": ("session", "Run"),
    "open": ("session", "open_run"),
    "plan": ("session.plan", "plan"),
    "record": ("session", "record"),
    "register": ("capture.blocks", "register"),
    "with_ids": ("capture", "with_ids"),
}

__all__ = [
    "BackstoryError",
    "Influence",
    "Recipe",
    "Recorder",
    "Run",
    "__version__",
    "open",
    "plan",
    "record",
    "register",
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
