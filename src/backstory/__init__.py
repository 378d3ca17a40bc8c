"""Backstory records how a model was trained, once, and answers which training examples made it do that, and when."""

from ._version import __version__
from .capture import with_ids
from .capture.blocks import register
from .errors import BackstoryError
from .session import Influence, Recipe, Recorder, Run, record
from .session import open_run as open
from .session.plan import plan

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
