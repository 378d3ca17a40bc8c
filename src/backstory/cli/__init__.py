"""The command line `backstory`: parses, calls one function, prints. No mathematics."""

from .app import main

__all__ = ["main"]
