"""Optional packages: imported on first use, or an error that says how to install them."""

import importlib
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.metadata import version
from io import StringIO
from types import ModuleType
from typing import Any

from ..errors import UnsupportedError


def extra(module: str, package: str) -> ModuleType:
    """The module, or an error with the line that installs its package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UnsupportedError(
            f"this method needs {package!r}, which cannot be imported ({error}). Install it with: pip install "
            "'backstory[baselines]'"
        ) from error


def release(package: str) -> str:
    """The package's version."""
    return version(package)


def subclass(base: Any, **members: Any) -> Any:
    """A class of the package's own kind; its base has no type that we know."""
    return type(f"Backstory{base.__name__}", (base,), members)


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars, no warnings about the package's own use of torch, and the root logger as it was."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with redirect_stderr(StringIO()), warnings.catch_warnings():
            for kind in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", kind)
            yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        sys.stderr.flush()
