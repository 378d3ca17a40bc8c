"""Every error that Backstory raises on purpose.

A message says what was found, what was expected and what to do. One root, so that
`except BackstoryError` catches all of them and nothing else.
"""


class BackstoryError(Exception):
    """The root of all errors that Backstory raises on purpose."""


class UsageError(BackstoryError, ValueError):
    """An argument, or the order of calls, cannot give right numbers."""


class CoverageError(BackstoryError):
    """A trained parameter is not covered by any layer rule, or a rule missed part of its gradient."""


class UnsupportedError(BackstoryError):
    """A layer mode or an optimizer whose mathematics Backstory does not model."""


class NumericalError(BackstoryError):
    """NaN or Inf where a number was expected."""


class StoreError(BackstoryError):
    """The run on disk cannot be read or written as asked."""


class LockedError(StoreError):
    """Another process is recording into the run."""


class DiskError(StoreError):
    """The disk is full, or the plan exceeds it or `max_bytes`."""


class FormatError(StoreError):
    """The run was written in a format that this version cannot read."""


class MismatchError(BackstoryError):
    """The model, the projection or the settings differ from those of the run."""
