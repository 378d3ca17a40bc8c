"""Exact answers through a replayed run: derivatives of every step, and training again without some samples."""

from .leave_out import tsloo
from .losses import QuerySet
from .query import query
from .reverse import unroll
from .tokens import TokenInfluence, tokens

__all__ = [
    "QuerySet",
    "TokenInfluence",
    "query",
    "tokens",
    "tsloo",
    "unroll",
]
