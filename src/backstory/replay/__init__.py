"""A recipe, and the recipe run again, step by step, checked against what was recorded."""

from .recipe import Presentation, Recipe, load_recipe
from .removal import Removal
from .reproduction import Reproduction, replay, reproduces, reproduction

__all__ = ["Presentation", "Recipe", "Removal", "Reproduction", "load_recipe", "replay", "reproduces", "reproduction"]
