"""Other attribution methods to compare with; each is one function that returns an `Influence`, as a query does."""

from .ekfac import ekfac
from .influence import influence_function, influence_sweep
from .similarity import gradient_cosine, gradient_dot, representation_similarity
from .tracin import run_checkpoints, tracin, tracin_run
from .trak import margins, trak

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
]
