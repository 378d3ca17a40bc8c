"""The methods people compare with, each one function that returns what a query returns."""

from .ekfac import ekfac
from .influence import influence_function, influence_sweep
from .models import run_checkpoints
from .representation import representation_similarity
from .similarity import gradient_cosine, gradient_dot
from .tracin import tracin, tracin_run
from .trak import margins, trak
from .traker import traker

__all__ = [
    "ekfac",
    "gradient_cosine",
    "gradient_dot",
    "influence_function",
    "influence_sweep",
    "margins",
    "representation_similarity",
    "run_checkpoints",
    "tracin",
    "tracin_run",
    "trak",
    "traker",
]
