"""Tensors are found in whatever holds them, and put back in a copy."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from backstory.capture.nested import nested, tensors_in, with_tensors

Pair = namedtuple("Pair", ["first", "second"])


@dataclass
class Record:
    x: Tensor
    other: Any = None


class Cache:
    def get_seq_length(self) -> int:
        return 3


def t(value: float) -> Tensor:
    return torch.tensor(value)


def test_tensors_of_all_structures_in_order() -> None:
    value = (t(0), [t(1), {"a": t(2)}], Pair(t(3), None), Record(t(4), (t(5), "text")), OrderedDict(z=t(6)))
    assert [int(x) for x in tensors_in(value)] == [0, 1, 2, 3, 4, 5, 6]
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 1)])
    assert len(tensors_in(packed)) == 2


def test_a_filled_copy_keeps_its_types_and_leaves_the_first_as_it_was() -> None:
    value = ([t(0)], {"record": Record(t(1), "text"), "cache": Cache()}, Pair(t(2), 5))
    filled = nested(value).filled((t(10), t(11), t(12)))
    assert [int(x) for x in tensors_in(filled)] == [10, 11, 12]
    assert [int(x) for x in tensors_in(value)] == [0, 1, 2]
    assert isinstance(filled[1]["record"], Record)
    assert isinstance(filled[2], Pair)
    assert (filled[1]["record"].other, filled[2].second) == ("text", 5)
    assert filled[1]["cache"] is None, "a second call would add to it"
    assert isinstance(value[1]["cache"], Cache)


def test_the_outputs_of_transformers_are_copied() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    out: Any = BaseModelOutput(last_hidden_state=t(1))  # type: ignore[arg-type]
    twin = with_tensors(out, lambda x: x + 1)
    assert (int(twin.last_hidden_state), int(twin["last_hidden_state"]), int(out.last_hidden_state)) == (2, 2, 1)
