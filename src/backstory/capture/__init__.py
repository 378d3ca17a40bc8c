"""Hooks on a live model: they read what one optimizer step does from the backward pass that training runs anyway."""

from .fingerprint import canonical, fingerprint
from .hooks import Tap
from .ids import with_ids
from .modules import Block, find_blocks
from .optimizers import SecondMoment, StepCoefficients
from .updates import OptimizerReader

__all__ = [
    "Block",
    "OptimizerReader",
    "SecondMoment",
    "StepCoefficients",
    "Tap",
    "canonical",
    "find_blocks",
    "fingerprint",
    "with_ids",
]
