"""Exact answers through a replayed run: derivatives of every step, and training again without some samples."""

from .leave_out import leave_out
from .losses import QuerySet
from .query import query
from .reverse import reverse
from .tokens import TokenInfluence, tokens

__all__ = [
    "QuerySet",
    "TokenInfluence",
    "leave_out",
    "query",
    "reverse",
    "tokens",
]
