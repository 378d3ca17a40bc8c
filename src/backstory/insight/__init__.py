"""Influence over time: when data mattered, how it faded, what erased it, what sources are worth, and what hurt.

Every result has `.as_dict()`, `.figure()` (Plotly) and `.to_pandas()`. Positive influence: the sample helped.
"""

from .analytic import Analytic, analytic
from .asking import SIGN, Question, asked
from .evolution import Evolution, evolution
from .harmful import Extremes, harmful
from .memorisation import Memorisation, memorisation, self_ranks
from .phases import Phases, phases
from .plots import page
from .saturation import Saturation, saturation
from .sources import Sources, sources
from .timeline import Timeline, timeline
from .words import common_words, marked

__all__ = [
    "SIGN",
    "Analytic",
    "Evolution",
    "Extremes",
    "Memorisation",
    "Phases",
    "Question",
    "Saturation",
    "Sources",
    "Timeline",
    "analytic",
    "asked",
    "common_words",
    "evolution",
    "harmful",
    "marked",
    "memorisation",
    "page",
    "phases",
    "saturation",
    "self_ranks",
    "sources",
    "timeline",
]
