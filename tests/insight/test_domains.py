"""Which query sets are domains: no query counts twice."""

import torch

from backstory.insight.sources import domains


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers)[:, None] * torch.ones(3, dtype=torch.int64)


def test_a_mix_of_the_others_is_no_domain() -> None:
    assert domains({"passages": rows(1, 4), "law": rows(1, 2, 3), "poems": rows(4, 5, 6)}) == ["law", "poems"]
    assert domains({"law": rows(1, 2), "poems": rows(3, 4), "all": rows(1, 2, 3, 4)}) == ["law", "poems"]


def test_a_part_of_another_set_is_no_domain() -> None:
    whole, labels = torch.rand(6, 1, 2, 2), torch.arange(6)
    assert domains({"test": (whole, labels), "demo": (whole[2:4], labels[2:4])}) == ["test"]
    assert domains({"test": (whole, labels), "other": (whole[2:4], labels[:2])}) == ["test", "other"]


def test_of_two_equal_sets_one_is_left_and_order_is_kept() -> None:
    assert domains({"a": rows(1, 2), "b": rows(2, 1), "c": rows(7)}) == ["b", "c"]
    assert domains({"poems": {"x": rows(3)}, "law": {"x": rows(1, 2)}}) == ["poems", "law"]
    assert domains({"only": rows(1)}) == ["only"]
    assert domains({}) == []


def test_sets_that_are_no_tensors_are_domains_of_their_own() -> None:
    assert domains({"a": "anything", "b": "anything", "c": ["x", rows(1)]}) == ["a", "b", "c"]
