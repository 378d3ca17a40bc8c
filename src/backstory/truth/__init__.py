"""The truth by retraining, and what needs a replay. Knows nothing of embeddings; only `tokens` of stored rows."""

from .asking import QuerySet
from .expected import Expected, expected_loo
from .kinks import KinkReport, kink_share
from .limit import LimitCurve, large_t_limit
from .query import query
from .removal import Removal
from .replay import Reproduction, replay, reproduces, reproduction
from .sgd_influence import sgd_influence
from .tokens import TokenInfluence, tokens
from .tsloo import tsloo
from .unroll import unroll

__all__ = [
    "Expected",
    "KinkReport",
    "LimitCurve",
    "QuerySet",
    "Removal",
    "Reproduction",
    "TokenInfluence",
    "expected_loo",
    "kink_share",
    "large_t_limit",
    "query",
    "replay",
    "reproduces",
    "reproduction",
    "sgd_influence",
    "tokens",
    "tsloo",
    "unroll",
]
