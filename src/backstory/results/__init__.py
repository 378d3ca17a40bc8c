"""What queries and insights return: numbers with their sign, unit, caveats, quality, tables and figures."""

from .comparison import Comparison, Ranking, Rankings
from .effects import Effect, GroupEffects, MoveEffects
from .influence import ByStep, Hit, Influence, Occurrences, SampleIndex
from .quality import Agreement, FirstOrder, Quality
from .recording_report import RecordingReport
from .result import Result
from .row import Row
from .sign import SIGN, describe_sign

__all__ = [
    "SIGN", "Agreement", "ByStep", "Comparison", "Effect", "FirstOrder", "GroupEffects", "Hit", "Influence", "MoveEffects",
    "Occurrences", "Quality", "Ranking", "Rankings", "RecordingReport", "Result", "Row", "SampleIndex",
    "describe_sign",
]  # fmt: skip
