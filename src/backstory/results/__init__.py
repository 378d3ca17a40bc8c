"""What queries and insights return: numbers with their sign, unit, caveats, quality, tables and figures."""

from .influence import ByStep, Hit, Influence, Occurrences, SampleIndex
from .quality import Quality
from .result import Result
from .sign import SIGN, describe_sign

__all__ = ["SIGN", "ByStep", "Hit", "Influence", "Occurrences", "Quality", "Result", "SampleIndex", "describe_sign"]
