"""Image data through torchvision or Hugging Face `datasets`, where one of them is installed.

Both are optional and imported only here, only when asked for. What they give is decoded; the caller checks it.
"""

import importlib
import importlib.util
import tempfile
from typing import Any

import numpy as np

from .fetch import OWN_PATH, DataError
from .formats import Array

PACKAGES = {"torchvision": "torchvision", "huggingface": "datasets"}


def installed(route: str) -> bool:
    """Whether the package of a route is there."""
    try:
        return importlib.util.find_spec(PACKAGES[route]) is not None
    except ValueError:  # a module that was put together by hand has no spec
        return True


def from_torchvision(name: str, train: bool) -> tuple[Array, Array]:
    """`(pixels, labels)` of one part of `torchvision.datasets.NAME`."""
    datasets = _import("torchvision.datasets", "torchvision", "torchvision")
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = getattr(datasets, name)(root=folder, train=train, download=True)
        except (OSError, RuntimeError) as error:
            raise DataError(f"torchvision could not download {name}: {error}. {OWN_PATH}") from error
    return np.asarray(found.data, np.uint8), np.asarray(found.targets, np.uint8)


def from_huggingface(name: str, part: str, column: str) -> tuple[Array, Array]:
    """`(pixels, labels)` of one part of a repository of Hugging Face."""
    datasets = _import("datasets", "huggingface", "'backstory[hf]'")
    try:
        rows = datasets.load_dataset(name, split=part)
        pairs = [(np.asarray(row[column], np.uint8), row["label"]) for row in rows]
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"datasets could not download {name}: {error}. {OWN_PATH}") from error
    return np.stack([p for p, _ in pairs]), np.array([y for _, y in pairs], np.uint8)


def _import(module: str, route: str, requirement: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(
            f"source {route!r} needs the package {PACKAGES[route]} ({error}): pip install {requirement}, "
            "or source='registry'."
        ) from None
