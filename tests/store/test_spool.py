"""Steps that wait for their basis."""

from pathlib import Path

import pytest
import torch
from tests.store.builders import new_run

from backstory.errors import StoreError
from backstory.store import RunStore


def test_a_step_comes_back_with_its_facts(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        tensors = {"a": torch.randn(2, 3), "b/δ": torch.arange(4)}
        size = store.spool(0, tensors, {"clip": 0.5, "ids": ["x", "ä"]})
        assert size == (tmp_path / "run/spool/step-00000000.safetensors").stat().st_size
        store.spool(1, tensors, {})
    back, meta = RunStore.open(tmp_path / "run").read_spool(0)
    assert meta == {"clip": 0.5, "ids": ["x", "ä"]}
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[k], tensors[k]) for k in tensors)


def test_clearing_drops_the_later_steps_only(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.clear_spool()
        for step in range(4):
            store.spool(step, {"a": torch.zeros(1)}, {})
        (tmp_path / "run/spool/step-00000009.safetensors.tmp").touch()
        assert store.spooled() == [0, 1, 2, 3]
        store.clear_spool(2)
        assert store.spooled() == [0, 1]
        assert len(list((tmp_path / "run/spool").iterdir())) == 2
        store.clear_spool()
        assert store.spooled() == []


def test_an_unknown_step_says_which_there_are(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.spool(3, {"a": torch.zeros(1)}, {})
        with pytest.raises(StoreError, match=r"step 5 is not in .*holds \[3\]"):
            store.read_spool(5)


def test_a_damaged_step_is_found_by_verify(tmp_path: Path) -> None:
    with new_run(tmp_path / "run") as store:
        store.spool(0, {"a": torch.zeros(9)}, {})
        file = tmp_path / "run/spool/step-00000000.safetensors"
        file.write_bytes(file.read_bytes()[:-4])
        assert ["step-00000000" in line for line in store.verify()] == [True]
