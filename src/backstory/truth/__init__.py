"""The truth by retraining. Knows nothing of stored rows of gradients, embeddings or estimates."""

from .asking import QuerySet
from .expected import Expected, expected_loo
from .kinks import KinkReport, kink_share
from .limit import LimitCurve, large_t_limit
from .query import query
from .removal import Removal
from .replay import Reproduction, replay, reproduces, reproduction
from .sgd_influence import sgd_influence
from .tsloo import tsloo
from .unroll import unroll

__all__ = [
    "Expected",
    "KinkReport",
    "LimitCurve",
    "QuerySet",
    "Removal",
    "Reproduction",
    "expected_loo",
    "kink_share",
    "large_t_limit",
    "query",
    "replay",
    "reproduces",
    "reproduction",
    "sgd_influence",
    "tsloo",
    "unroll",
]
