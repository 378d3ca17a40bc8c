"""What queries and insights return: numbers with their sign, unit, caveats, quality, tables and figures."""

from .comparison import Comparison, Ranking, Rankings
from .effects import Effect, GroupEffects, MoveEffects
from .influence import ByStep, Hit, Influence, Occurrences, SampleIndex
from .quality import Quality
from .result import Result
from .row import Row
from .sign import SIGN, describe_sign

__all__ = [
    "SIGN", "ByStep", "Comparison", "Effect", "GroupEffects", "Hit", "Influence", "MoveEffects", "Occurrences", "Quality", "Ranking",
    "Rankings", "Result", "Row", "SampleIndex",
    "describe_sign",
]  # fmt: skip
