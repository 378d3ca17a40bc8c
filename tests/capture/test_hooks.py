"""The hooks themselves: which calls they see, to which micro-batch a call belongs, and what they refuse."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from backstory.capture.hooks import Tap
from backstory.capture.modules import Blocks, find_blocks
from backstory.errors import UsageError
from backstory.maths.layers import RULES, Contribution, Dense, Outer


class Seen:
    """A model with a tap on it, and what came out of the tap."""

    def __init__(self, model: nn.Module, groups: int = 1, batch_dim: int | None = None) -> None:
        self.model = model.double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.blocks: Blocks = find_blocks(model, optimizer, rank=None)
        self.parts: list[tuple[int, str, Contribution]] = []
        self.tap = Tap(model, self.blocks, self._sink, groups=groups, batch_dim=batch_dim)
        self.groups: list[int | None] = []

    def _sink(self, slot: int, block: int, part: Contribution, group: int | None) -> None:
        self.parts.append((slot, self.blocks.blocks[block].name, part))
        self.groups.append(group)

    def __enter__(self) -> "Seen":
        self.tap.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.tap.detach()


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_a_call_belongs_to_the_micro_batch_of_its_forward() -> None:
    with Seen(nn.Linear(2, 3, bias=False)) as seen:
        seen.tap.batch(2)
        first = seen.model(x(2, 2)).sum()
        seen.tap.batch(4)
        seen.model(x(4, 2)).sum().backward()
        first.backward()
    sizes = [(slot, len(part.right)) for slot, _, part in seen.parts if isinstance(part, Outer)]
    assert sizes == [(1, 4), (0, 2)]


@pytest.mark.parametrize("when", ["before a batch", "no_grad", "not differentiated", "after detach"])
def test_what_is_no_part_of_a_step_is_not_seen(when: str) -> None:
    with Seen(nn.Linear(2, 3)) as seen:
        if when == "before a batch":
            seen.model(x(2, 2)).sum().backward()
        seen.tap.batch(2)
        if when == "no_grad":
            with torch.no_grad():
                seen.model(x(5, 2))
        if when == "not differentiated":
            seen.model(x(5, 2))
    if when == "after detach":
        seen.model(x(2, 2)).sum().backward()
    assert seen.parts == []


def test_a_backward_after_the_step_is_not_seen() -> None:
    with Seen(nn.Linear(2, 3)) as seen:
        seen.tap.batch(2)
        late = seen.model(x(2, 2)).sum()
        seen.tap.begin()
        late.backward()
    assert seen.parts == []


def test_only_recorded_parameters_are_handed_on() -> None:
    model = nn.Linear(2, 3)
    model.weight.requires_grad_(False)
    with Seen(model) as seen:
        seen.tap.batch(2)
        model(x(2, 2)).sum().backward()
    assert [name for _, name, _ in seen.parts] == ["bias"]


def test_inputs_given_by_name_are_seen() -> None:
    with Seen(nn.Linear(2, 3, bias=False)) as seen:
        seen.tap.batch(2)
        seen.model(input=x(2, 2)).sum().backward()
    (part,) = [part for _, _, part in seen.parts]
    assert isinstance(part, Outer)
    assert torch.equal(part.right[:, 0], x(2, 2))


def test_half_precision_is_widened_before_anything_is_summed() -> None:
    with Seen(nn.Linear(2, 3)) as seen:
        seen.model.bfloat16()
        seen.tap.batch(2)
        seen.model(x(2, 2).bfloat16()).sum().backward()
    assert {t.dtype for _, _, part in seen.parts for t in part if isinstance(t, Tensor)} == {torch.float32}


def test_a_copy_of_the_model_made_while_recording_works_and_is_not_seen() -> None:
    with Seen(nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))) as seen:
        seen.tap.batch(3)
        twin = copy.deepcopy(seen.model)
        twin(torch.tensor([1, 2, 2])).sum().backward()
    assert seen.parts == []
    assert twin.get_parameter("1.weight").grad is not None


def test_more_rows_than_samples_are_refused_where_the_model_cannot_be_tried() -> None:
    with Seen(nn.Sequential(nn.Flatten(0, 1), nn.Linear(2, 3))) as seen:
        seen.tap.batch(3)
        loss = seen.model(x(2, 4, 2)).sum()
        with pytest.raises(UsageError, match=r"layer '1' .* shape \(8, 3\).* declares 3 samples.*batch_dim="):
            loss.backward()


@pytest.mark.parametrize("recorded", [True, False])
def test_batch_norm_in_training_mode_is_noted_even_if_it_is_not_recorded(recorded: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=recorded))
    with Seen(model) as seen:
        seen.model(x(2, 2))  # outside a step: none of our business
        seen.tap.batch(2)
        with torch.no_grad():
            seen.model(x(2, 2))
        seen.model[1].eval()  # type: ignore[index]
        seen.model(x(2, 2)).sum().backward()
        assert seen.tap.shared_statistics == set()
        seen.model.train()
        seen.model(x(2, 2)).sum().backward()
        assert seen.tap.shared_statistics == {"1"}
    assert len(seen.parts) == 2 * (4 if recorded else 2)


@pytest.mark.parametrize("index", [torch.arange(3), torch.arange(3)[None]])
def test_positions_for_the_whole_batch_are_looked_up_for_each_sample(index: Tensor) -> None:
    with Seen(nn.Embedding(4, 2)) as seen:
        plain = seen.model(index)
        seen.tap.batch(5)
        out = seen.model(index)
        assert out.shape == (5, 3, 2)
        assert torch.equal(out, plain.expand(5, 3, 2))
        with torch.no_grad():
            assert seen.model(index).shape == plain.shape
        out.sum().backward()
    (part,) = [part for _, _, part in seen.parts]
    assert isinstance(part, Outer)
    assert torch.equal(part.left, torch.arange(3).expand(5, 3))


def test_one_index_for_each_sample_stays_as_it_is() -> None:
    with Seen(nn.Embedding(4, 2)) as seen:
        seen.tap.batch(3)
        assert seen.model(torch.tensor([2, 1, 1])).shape == (3, 2)
        assert seen.model(torch.tensor([0, 1, 2])).shape == (3, 2), "the classes of a batch may happen to be 0, 1, 2"


def test_an_index_that_may_be_either_is_refused_until_it_is_known() -> None:
    with Seen(nn.Sequential(nn.Embedding(4, 2))) as seen:
        seen.tap.batch(3)
        with pytest.raises(
            UsageError, match=r"embedding '0' got the indices 0 … 2 with a batch of 3 samples.*\(1, S\).*\(B, 1\)"
        ):
            seen.model(torch.arange(3))
        assert seen.model(torch.arange(3)[None]).shape == (3, 3, 2)
        assert seen.model(torch.arange(3)[:, None]).shape == (3, 1, 2)
        assert seen.model(torch.arange(4)).shape == (3, 4, 2)
        assert seen.model(torch.arange(3)).shape == (3, 3, 2), "it was positions before, so it is now"


class Odd(nn.Linear):
    """A layer with a rule of its own."""


def test_the_shape_that_a_custom_rule_gives_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
        return {"weight": delta}

    monkeypatch.setitem(RULES, Odd, flat)
    with Seen(Odd(2, 3)) as seen:
        seen.tap.batch(2)
        with pytest.raises(
            UsageError, match=r"rule for Odd must return .* shape \(B, 3, 2\) for 'weight', got \(2, 3\)"
        ):
            seen.model(x(2, 2)).sum().backward()


def test_a_tensor_from_a_custom_rule_is_a_gradient_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
        return {"weight": torch.einsum("bo,bi->boi", delta, inputs[0]), "unknown": delta}

    monkeypatch.setitem(RULES, Odd, plain)
    with Seen(Odd(2, 3)) as seen:
        seen.tap.batch(2)
        seen.model(x(2, 2)).sum().backward()
    (part,) = [part for _, _, part in seen.parts]
    assert isinstance(part, Dense)
    assert torch.equal(part.grads, x(2, 2)[:, None].expand(2, 3, 2))


def written_out(module: nn.Module, inputs: tuple[Tensor, ...], delta: Tensor) -> Mapping[str, Tensor]:
    flat, seen = delta.flatten(1, -2), inputs[0].flatten(1, -2)
    return {"weight": torch.einsum("bso,bsi->boi", flat, seen)}


@pytest.mark.parametrize("shape", [(5,), (2, 5)])
def test_a_gradient_that_its_rule_wrote_out_is_asked_for_again_for_each_group(
    shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RULES, Odd, written_out)
    inputs = x(2, *shape, 2)
    with Seen(Odd(2, 3, bias=False), groups=3, batch_dim=0) as seen:
        seen.tap.batch(2)
        seen.model(inputs).sum().backward()
    flat, S = inputs.flatten(1, -2), torch.Size(shape).numel()
    assert seen.groups == [0, 1, 2]
    for k, (_, _, part) in enumerate(seen.parts):
        assert isinstance(part, Dense)
        expected = flat[:, k * S // 3 : (k + 1) * S // 3].sum(1)[:, None].expand(2, 3, 2)
        torch.testing.assert_close(part.grads, expected)


def test_positions_of_a_grouped_convolution_are_not_its_channels() -> None:
    layer = nn.Conv1d(2, 4, 1, groups=2, bias=False)
    inputs = x(2, 2, 6)
    with Seen(layer, groups=3) as seen:
        seen.tap.batch(2)
        seen.model(inputs).sum().backward()
    for k, (_, _, part) in enumerate(seen.parts):
        assert isinstance(part, Dense)
        expected = inputs[:, :, 2 * k : 2 * k + 2].sum(2).repeat_interleave(2, 1)
        torch.testing.assert_close(part.grads.flatten(1), expected)
    assert seen.groups == [0, 1, 2]


@pytest.mark.parametrize("groups", [1, 3])
def test_what_keeps_its_positions_or_has_none_is_handed_on_once(groups: int) -> None:
    with Seen(nn.Linear(2, 3), groups=groups) as seen:
        seen.tap.batch(2)
        seen.model(x(2, 5, 2)).sum().backward()
        seen.model(x(2, 2)).sum().backward()
    assert seen.groups == [None] * 4
