"""Influence over time: when data mattered, how it faded, what overwrote it, what sources are worth, and what hurt.

Every function returns a `backstory.results.Result`. The variants named `…_of` start from an existing `Influence`.
"""

from ..results.influence import RankedSample
from .evolution import Evolution, evolution, evolution_of
from .harmful import Harmful, harmful, harmful_of
from .memorisation import Memorisation, memorisation, memorisation_of
from .neighbours import Neighbours, OnQueries, neighbours, on_queries, on_queries_of
from .overwriting import Overwriter, Overwriting, overwriting, overwriting_of
from .phases import Phases, phases
from .sources import Sources, sources, sources_of
from .timeline import Timeline, timeline, timeline_of
from .tokens import TokenInfluence, tokens

__all__ = [
    "Evolution",
    "Harmful",
    "Memorisation",
    "Neighbours",
    "OnQueries",
    "Overwriter",
    "Overwriting",
    "Phases",
    "RankedSample",
    "Sources",
    "Timeline",
    "TokenInfluence",
    "evolution",
    "evolution_of",
    "harmful",
    "harmful_of",
    "memorisation",
    "memorisation_of",
    "neighbours",
    "on_queries",
    "on_queries_of",
    "overwriting",
    "overwriting_of",
    "phases",
    "sources",
    "sources_of",
    "timeline",
    "timeline_of",
    "tokens",
]
