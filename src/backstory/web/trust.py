"""The recording's quality in the service's own shape; judged and worded by `results.quality`."""

from collections.abc import Mapping
from typing import Any

from ..results.quality import Quality
from ..results.result import plain
from .schemas import Trust

KNOWN = ("clipped", "coverage", "retained", "drift", "largest_growth", "largest_growth_step")


def trust(quality: Mapping[str, Any]) -> Trust:
    """The report as it is sent: the verdict and its reason first; of nothing: not known."""
    judged = plain(Quality.from_dict(quality).as_dict())
    numbers = {k: judged[k] for k in KNOWN} if quality else {}
    count: dict[str, Any] = {"expanding_steps": len(judged["expanding_steps"])} if quality else {}
    return Trust(**{k: judged[k] for k in ("verdict", "reason", "early", "words")}, **numbers, **count)
