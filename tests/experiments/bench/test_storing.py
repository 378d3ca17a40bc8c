"""Every configuration stands beside the reference with its own curvature setting."""

import pytest
from experiments.bench.recording import OWN
from experiments.bench.storing import COMPRESSED, STORES, bench_store

from experiments.bench import storing


def test_references_come_first_and_have_the_same_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storing, "STEPS", 2)
    actual = bench_store(scale="tiny")
    references = {x["curvature"]: x for x in actual if x["configuration"].startswith("reference")}
    assert references.keys() == {"empirical", "empirical/6", "sampled:1/6", "sampled:2/6"}
    ours = [x for x in actual if not x["configuration"].startswith("reference")]
    assert [x["configuration"] for x in ours] == [*STORES, *COMPRESSED]
    for line in ours:
        expected = references[line["curvature"]]["bytes_per_occurrence"] / line["bytes_per_occurrence"]
        assert line["times_smaller"] == expected
        compressed = line["configuration"] in COMPRESSED
        own = line["configuration"].startswith(OWN) and not compressed
        assert line["rows"] == (references[line["curvature"]]["rows"] if own else 1)
        assert compressed == ("compressed" in line["settings"])
    sizes = {x["configuration"]: x["bytes_per_occurrence"] for x in ours}
    assert sizes["default"] < sizes["float16"]
    assert sizes[f"{OWN}, int8"] < sizes[OWN]
    assert sizes[f"{OWN}, int8, compressed"] < sizes[f"{OWN}, compressed"]
