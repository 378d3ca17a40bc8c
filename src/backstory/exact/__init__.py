"""Exact results from a replayed run: derivatives through every step, and retraining without some samples."""

from .check import Check, check
from .leave_out import leave_out
from .losses import QuerySet
from .reverse import reverse
from .tangent import Group, tangent

__all__ = ["Check", "Group", "QuerySet", "check", "leave_out", "reverse", "tangent"]
