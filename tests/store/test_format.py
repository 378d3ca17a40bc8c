"""Format 2, frozen: whoever changes these must raise the format's version and keep a reader for the old one."""

import zlib
from dataclasses import replace

import torch
from tests.store.builders import record, split_record

from backstory.maths.steps import NAMES
from backstory.store import codec, layout
from backstory.store.schema import GROUP_KEYS, embeddings_schema, rows_schema, samples_schema, steps_schema


def text(schema: object) -> list[str]:
    return [line.replace("child 0, item: ", "").strip() for line in str(schema).splitlines() if "child" not in line]


def test_the_version_and_the_columns_are_those_of_format_1() -> None:
    assert (layout.FORMAT, layout.FEATURES) == (1, ("factors", "windows", "own"))
    assert text(rows_schema([5, 7], "float16", 2)) == [
        "step: int32", "pos: int32", "sample: string", "weight: double", "loss: double", "gdot: double",
        "g: fixed_size_list<item: halffloat>[12]", "s: fixed_size_list<item: float>[2]",
        "h: fixed_size_list<item: halffloat>[24]", "hs: fixed_size_list<item: float>[4]",
        "kappa: fixed_size_list<item: double>[2]", "hdot: fixed_size_list<item: double>[2]",
    ]  # fmt: skip
    assert text(steps_schema(3)) == [
        "step: int32", "row_start: int64", "rows: int32", "clip: double", "norm: double", "coverage: double", "size: double",
        "drift: double", "trained: double", "crc: int64",
        *(f"{key}: fixed_size_list<item: double>[3]" for key in ("rate", "l2", "decay", "momentum", "tau", "a", "n")),
        "batch: int64", "generators: fixed_size_list<item: int64>[4]", "random: binary",
    ]  # fmt: skip
    assert text(rows_schema([5, 7], "int8", 2, split=True))[5:7] == [
        "gdot: double",
        "h: fixed_size_list<item: int8>[24]",
    ]
    assert text(steps_schema(3, diagonal=12))[-1] == "P: fixed_size_list<item: float>[12]"
    assert text(samples_schema()) == ["id: string", "text: string", "image: binary", "label: string", "source: string"]
    assert text(embeddings_schema([5, 7], "int8")) == [
        "step: int32", "pos: int32", "e: fixed_size_list<item: int8>[12]", "se: fixed_size_list<item: float>[2]",
    ]  # fmt: skip


def test_the_checksum_is_that_of_format_1() -> None:
    made = record(4)
    made = type(made)(
        **{**made.__dict__, "rows": torch.arange(24.0).reshape(2, 12), "weight": torch.tensor([0.5, 0.25])}
    )
    made = type(made)(**{**made.__dict__, "loss": torch.tensor([1.0, 2.0]), "gdot": torch.tensor([3.0, 4.0])})
    actual = {name: codec.rows_table([made], [5, 7], name)[1] for name in ("float64", "int8")}
    assert actual == CHECKSUMS


CHECKSUMS = {"float64": [3960689379], "int8": [2862082343]}


def test_the_checksum_of_a_split_step_and_of_a_diagonal() -> None:
    """By zlib, over bytes put together here: h, then numbers in the order of the document, P as float32, ids last."""
    split = split_record(4)
    assert split.curvature is not None
    given = replace(split, P=torch.arange(12, dtype=torch.float64) / 7)
    numbers = [split.weight, split.loss, split.gdot, split.curvature, split.kappa, split.hdot]
    body = b"".join(x.numpy().tobytes() for x in numbers if x is not None)
    ids = b"".join(name.encode() + b"\0" for name in split.samples)
    diagonal = (torch.arange(12, dtype=torch.float64) / 7).float().numpy().tobytes()
    for made, expected in ((split, body + ids), (given, body + diagonal + ids)):
        assert codec.rows_table([made], [5, 7], "float64", 3, split=True)[1] == [zlib.crc32(expected)]


def test_coefficients_have_the_same_names_in_store_and_mathematics() -> None:
    assert GROUP_KEYS == NAMES
