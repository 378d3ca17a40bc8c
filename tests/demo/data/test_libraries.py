"""torchvision and Hugging Face's datasets, by made-up modules; neither is needed."""

import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from backstory.demo.data import libraries
from backstory.demo.data.fetch import DataError


def module(monkeypatch: pytest.MonkeyPatch, name: str, **content: Any) -> None:
    made = types.ModuleType(name)
    made.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, made)


def test_a_missing_library_is_told_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install torchvision, or source='registry'"):
        libraries.from_torchvision("MNIST", True)
    with pytest.raises(DataError, match=r"pip install 'backstory\[hf\]'"):
        libraries.from_huggingface("some/where", "train", "image")


def test_what_they_give_becomes_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            self.data, self.targets = torch.full((2, 28, 28), 9, dtype=torch.uint8), torch.tensor([int(train), 4])

    def load(name: str, split: str) -> list[dict[str, Any]]:
        return [{"img": [[1, 2]], "label": 3}, {"img": [[4, 5]], "label": 6}]

    module(monkeypatch, "torchvision")
    module(monkeypatch, "torchvision.datasets", Fake=Fake)
    module(monkeypatch, "datasets", load_dataset=load)
    pixels, labels = libraries.from_torchvision("Fake", True)
    assert pixels.dtype == np.uint8
    assert (pixels.shape, labels.tolist()) == ((2, 28, 28), [1, 4])
    pixels, labels = libraries.from_huggingface("some/where", "test", "img")
    assert (pixels.tolist(), labels.tolist()) == ([[[1, 2]], [[4, 5]]], [3, 6])


def test_a_failing_download_is_a_plain_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise RuntimeError("no network")

    module(monkeypatch, "torchvision")
    module(monkeypatch, "torchvision.datasets", MNIST=away)
    module(monkeypatch, "datasets", load_dataset=away)
    with pytest.raises(DataError, match="no network"):
        libraries.from_torchvision("MNIST", True)
    with pytest.raises(DataError, match="no network"):
        libraries.from_huggingface("some/where", "train", "image")


def test_installed_says_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(libraries.PACKAGES, "torchvision", "numpy")
    monkeypatch.setitem(libraries.PACKAGES, "huggingface", "no_such_package")
    assert libraries.installed("torchvision")
    assert not libraries.installed("huggingface")
