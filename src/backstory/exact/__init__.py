"""Exact answers through a replayed run: derivatives of every step, and training again without some samples."""

from .check import Check, check
from .leave_out import leave_out
from .losses import QuerySet
from .reverse import query, reverse
from .tokens import TokenInfluence, tokens

__all__ = ["Check", "QuerySet", "TokenInfluence", "check", "leave_out", "query", "reverse", "tokens"]
