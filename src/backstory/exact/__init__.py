"""Exact results from a replayed run: derivatives through every step, and retraining without some samples."""

from .check import Check, check
from .leave_out import leave_out
from .losses import QuerySet
from .reverse import query, reverse
from .tokens import TokenInfluence, tokens

__all__ = ["Check", "QuerySet", "TokenInfluence", "check", "leave_out", "query", "reverse", "tokens"]
