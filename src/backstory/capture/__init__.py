"""Hooks on a live model: what one optimizer step did, read from the backward pass that was there anyway."""

from .blocks import Block, find_blocks
from .fingerprint import canonical, fingerprint
from .ids import with_ids
from .optimizer import OptimizerReader
from .tap import Tap

__all__ = ["Block", "OptimizerReader", "Tap", "canonical", "find_blocks", "fingerprint", "with_ids"]
