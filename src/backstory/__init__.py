"""Backstory records how a model was trained, once, and answers which training examples made it do that, and when."""

from ._version import __version__
from .capture import with_ids
from .capture.blocks import register
from .errors import BackstoryError
from .recording.plan import plan
from .recording.recorder import Recorder
from .recording.start import record
from .replay.recipe import Recipe
from .results.influence import Influence
from .run.run import Run
from .run.run import open_run as open

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
