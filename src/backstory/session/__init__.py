"""Record, embed, query: where capture, store and mathematics meet. Knows nothing of the command line."""

from .answer import Hit, Influence
from .recipe import Recipe, load_recipe
from .recorder import Recorder
from .recording import record
from .run import Run, open_run

__all__ = ["Hit", "Influence", "Recipe", "Recorder", "Run", "load_recipe", "open_run", "record"]
