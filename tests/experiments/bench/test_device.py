"""The check of a device, on the one that is always there, and on one that is not."""

import re
from typing import Any

import pytest
import torch
from experiments.bench.device import check_device
from torch import Tensor

from backstory.errors import UsageError
from experiments.bench import device


def quiet(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def actual() -> dict[str, Any]:
    return check_device("cpu", scale="tiny", say=quiet)


def test_the_cpu_agrees_with_itself(actual: dict[str, Any]) -> None:
    assert [check["found"] for check in actual["checks"] if not check["passed"]] == []
    same = [check["found"] for check in actual["checks"] if "differs" in check["found"]]
    assert len(same) == 5
    assert all(float(re.findall(r"by (\S+) of the largest value", text)[0]) < device.ROUNDING for text in same)
    assert [line["workload"][0] for line in actual["recording"]] == ["B", "C"]


def test_numbers_that_differ_are_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(where: str, path: Any, settings: Any) -> Tensor:
        return torch.ones(3) + (1e-2 if "there" in str(path) else 0)

    monkeypatch.setattr(device, "_asked", off)
    failed = [c for c in check_device("cpu", scale="tiny", say=quiet)["checks"] if not c["passed"]]
    assert [c["check"] for c in failed] == ["answers, AdamW, the default", "answers, AdamW, sampled:1/6"]
    assert "differs from the CPU by 1.0e-02" in failed[0]["found"]


def test_a_device_that_torch_cannot_use_is_refused() -> None:
    with pytest.raises(UsageError, match=r"torch cannot use the device 'cuda:9'.*such as cuda"):
        check_device("cuda:9", say=quiet)
