"""A recipe, and the recipe run again, step by step, checked against what was recorded."""

from .recipe import Presentation, Recipe, load_recipe
from .reproduction import Reproduction, replay, reproduces, reproduction
from .tape import Removal

__all__ = ["Presentation", "Recipe", "Removal", "Reproduction", "load_recipe", "replay", "reproduces", "reproduction"]
