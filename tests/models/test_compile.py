"""torch.compile and wrappers of torch: recorded rightly, or refused before a row is written."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.models.language import Nano, adamw, logits_of, make, text, train
from tests.support.oracles import assert_close
from torch import nn

import backstory
from backstory.errors import UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own look
WHOLE = [[0, 1, 2, 3, 4]]  # one shape: compiled once


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    ("how", "backend"),
    [("whole", "eager"), ("whole", "aot_eager"), ("method", "aot_eager"), ("wrapper of what is recorded", "eager")],
)
def test_rows_of_a_compiled_model(how: str, backend: str, tmp_path: Path) -> None:
    model, plain = make("nanoGPT"), make("nanoGPT")
    forward = None
    if how == "method":
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)
        assert isinstance(compiled, nn.Module)
        forward = compiled
    recorded = forward if how == "whole" and forward is not None else model
    actual, _ = train(tmp_path / "run", recorded, adamw(model), forward=forward, truth=plain, parts=WHOLE, steps=1)
    _, expected = train(tmp_path / "plain", plain, adamw(plain), parts=WHOLE, steps=1)
    assert_close(actual.rows, expected, 1e-9, "0 means that the compiled graph went past the hooks.")
    assert actual.names == [n for n, _ in plain.named_parameters()], "names are those without the wrapper"


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_submodule_that_is_compiled(tmp_path: Path) -> None:
    model, plain = make("nanoGPT"), make("nanoGPT")
    assert isinstance(model, Nano)
    compiled = torch.compile(model.blocks[1], backend="eager")
    assert isinstance(compiled, nn.Module)
    model.blocks[1] = compiled
    actual, _ = train(tmp_path / "run", model, adamw(model), truth=plain, parts=WHOLE, steps=1)
    _, expected = train(tmp_path / "plain", plain, adamw(plain), parts=WHOLE, steps=1)
    assert_close(actual.rows, expected, 1e-9)
    assert actual.names == [n for n, _ in plain.named_parameters()]


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_graph_from_before_the_recording_is_made_anew(tmp_path: Path) -> None:
    """Such a graph has no hooks in it; those around the layers make torch look for new ones."""
    model, plain = make("nanoGPT"), make("nanoGPT")
    compiled = torch.compile(model, backend="eager")
    assert isinstance(compiled, nn.Module)
    logits_of(compiled, text()).sum().backward()
    actual, _ = train(tmp_path / "run", model, adamw(model), forward=compiled, truth=plain, parts=WHOLE, steps=4)
    expected, _ = train(tmp_path / "plain", plain, adamw(plain), parts=WHOLE, steps=4)
    assert_close(actual.rows, expected.rows, 1e-9)


def test_data_parallel_without_devices(tmp_path: Path) -> None:
    model, plain = make("nanoGPT"), make("nanoGPT")
    actual, _ = train(tmp_path / "run", nn.DataParallel(model), adamw(model), truth=plain, steps=1)
    _, expected = train(tmp_path / "plain", plain, adamw(plain), steps=1)
    assert_close(actual.rows, expected, 1e-9)
    assert actual.names == [n for n, _ in plain.named_parameters()]


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'meeting'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_distributed_data_parallel_in_one_process(tmp_path: Path) -> None:
    model, plain = make("nanoGPT"), make("nanoGPT")
    wrapped = nn.parallel.DistributedDataParallel(model)
    actual, _ = train(tmp_path / "run", wrapped, adamw(model), truth=plain, parts=WHOLE, steps=1)
    _, expected = train(tmp_path / "plain", plain, adamw(plain), parts=WHOLE, steps=1)
    assert_close(actual.rows, expected, 1e-9)
    assert actual.names == [n for n, _ in plain.named_parameters()]


@pytest.mark.usefixtures("_one_process")
def test_several_processes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("nanoGPT")
    wrapped = nn.parallel.DistributedDataParallel(model)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(
        UnsupportedError, match=r"DistributedDataParallel splits training across 2 processes.*Train in one process"
    ):
        backstory.record(wrapped, adamw(model), tmp_path / "run", loss_reduction="mean")
    assert not (tmp_path / "run").exists()
