"""The errors that Backstory raises.

A message says what happened, what was expected and what to do. A bad argument reads "rank must be at least 1, got 0."
All errors share one base class: `except BackstoryError` catches all of them and nothing else.
"""

from collections.abc import Collection


class BackstoryError(Exception):
    """Base class of all errors that Backstory raises."""


class UsageError(BackstoryError, ValueError):
    """An invalid argument, or calls in the wrong order."""


class CoverageError(BackstoryError):
    """A trained parameter is not covered by any layer rule, or a rule missed part of its gradient."""


class UnsupportedError(BackstoryError):
    """A layer, an optimizer or a training setup that Backstory does not support."""


class NumericalError(BackstoryError):
    """NaN or Inf where a finite number was expected."""


class StoreError(BackstoryError):
    """The run on disk cannot be read or written."""


class LockedError(StoreError):
    """Another process is recording into the run."""


class DiskError(StoreError):
    """The disk is full, or the run would exceed the disk or `max_bytes`."""


class FormatError(StoreError):
    """The run has a format that this version cannot read."""


class MismatchError(BackstoryError):
    """The model, weights, recipe or settings do not match the run."""


def check_one_of(name: str, value: object, allowed: Collection[object]) -> None:
    """Refuse a word that is not one of those allowed."""
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}.")
