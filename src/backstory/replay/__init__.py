"""Recipes, and replaying them step by step, checked against the recording."""

from .check import RecipeCheck, check_recipe
from .preference import preference
from .recipe import Presentation, Recipe, load_recipe
from .reproduction import Departure, Reproduction, replay, reproduces, reproduction
from .tape import Removal

__all__ = [
    "Departure",
    "Presentation",
    "Recipe",
    "RecipeCheck",
    "Removal",
    "Reproduction",
    "check_recipe",
    "load_recipe",
    "preference",
    "replay",
    "reproduces",
    "reproduction",
]
