"""One word for a model's weights: wrappers do not change it, anything else does."""

import copy

import torch
from torch import nn

from backstory.capture.fingerprint import canonical, fingerprint, weights


class Wrapper(nn.Module):
    """What DataParallel does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Compiled(nn.Module):
    """What torch.compile does to names."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))


def test_names_lose_what_wrappers_added() -> None:
    assert canonical("module._orig_mod.module.a.weight") == "a.weight"
    assert canonical("encoder._orig_mod.weight") == "encoder.weight"
    assert canonical("my_module.weight") == "my_module.weight"


def test_wrappers_do_not_change_it() -> None:
    plain = model()
    half_compiled = copy.deepcopy(plain)
    half_compiled[0] = Compiled(half_compiled[0])
    for wrapped in (Wrapper(plain), Compiled(plain), Wrapper(Compiled(plain)), Compiled(Wrapper(plain)), half_compiled):
        assert fingerprint(wrapped) == fingerprint(plain)
        assert weights(wrapped).keys() == weights(plain).keys()
    assert fingerprint(nn.DataParallel(plain)) == fingerprint(plain)
    compiled = torch.compile(plain, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert fingerprint(compiled) == fingerprint(plain)


def test_the_smallest_change_of_a_weight_a_buffer_a_type_or_a_name_changes_it() -> None:
    known = fingerprint(model())
    assert fingerprint(model()) == known
    changed = model()
    changed.get_parameter("0.weight").data.view(torch.int32)[0, 0] += 1
    buffer = model()
    buffer.get_buffer("1.running_mean")[0] = 1e-30
    renamed = nn.ModuleDict({"a": model()[0], "b": model()[1], "c": model()[2]})
    for other in (changed, buffer, model().double(), renamed):
        assert fingerprint(other) != known


def test_it_does_not_depend_on_strides_or_mode_and_knows_empty_tensors() -> None:
    turned = model()
    turned.get_parameter("0.weight").data = turned.get_parameter("0.weight").data.T.contiguous().T
    assert fingerprint(turned.eval()) == fingerprint(model())
    empty = nn.Module()
    empty.register_buffer("nothing", torch.zeros(0, 2))
    assert len(fingerprint(empty)) == 32


def test_weights_are_copies() -> None:
    kept = model()
    held = weights(kept)
    before = held["0.weight"].clone()
    kept.get_parameter("0.weight").data.add_(1)
    assert torch.equal(held["0.weight"], before)
