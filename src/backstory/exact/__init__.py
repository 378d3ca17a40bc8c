"""Exact answers through a replayed run: derivatives of every step, and training again without some samples."""

from .expected import Expected, expected_loo
from .kinks import KinkReport, kink_share
from .leave_out import tsloo
from .limit import LimitCurve, large_t_limit
from .losses import QuerySet
from .query import query
from .reverse import unroll
from .sgd_influence import sgd_influence
from .tokens import TokenInfluence, tokens

__all__ = [
    "Expected",
    "KinkReport",
    "LimitCurve",
    "QuerySet",
    "TokenInfluence",
    "expected_loo",
    "kink_share",
    "large_t_limit",
    "query",
    "sgd_influence",
    "tokens",
    "tsloo",
    "unroll",
]
