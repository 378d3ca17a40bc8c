"""What queries and insights return: scores with their sign, caveats, quality and tables."""

from .influence import Hit, Influence

__all__ = ["Hit", "Influence"]
