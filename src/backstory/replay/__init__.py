"""Recipes, and replaying them step by step, checked against the recording."""

from .recipe import Presentation, Recipe, load_recipe
from .reproduction import Departure, Reproduction, replay, reproduces, reproduction
from .tape import Removal

__all__ = [
    "Departure",
    "Presentation",
    "Recipe",
    "Removal",
    "Reproduction",
    "load_recipe",
    "replay",
    "reproduces",
    "reproduction",
]
