from typing import Any

from experiments.gpt.text import markdown

PAPER: dict[str, Any] = {
    "method": "paper", "optimizer_model": "sgd proxy, literal", "dims": 82416, "mean": 0.25, "seeds": [0.2, 0.3],
    "against_paper": None, "recording_ratio": None, "bytes_per_occurrence": None, "seconds": 1.26, "default": False,
}  # fmt: skip
OURS: dict[str, Any] = {
    **PAPER, "method": "default", "optimizer_model": "adamw, implicit", "dims": 3056, "mean": 0.75, "seeds": [0.7, 0.8],
    "against_paper": {"mean": 0.5, "lower": 0.25, "upper": 0.625}, "recording_ratio": 1.25, "bytes_per_occurrence": 54600.0,
    "default": True,
}  # fmt: skip
FOUND = {
    "seeds": [0, 3],
    "ceiling": {"mean": 0.9876, "seeds": [0.98, 0.99]},
    "rows": [PAPER, OURS],
    "contrasts": [{"method": "a", "against": "b", "mean": 0.5, "lower": 0.25, "upper": 0.75}],
    "failed": ["trak: why"],
}


def test_every_figure_stands_in_its_column() -> None:
    lines = markdown(FOUND).splitlines()
    assert lines[0].count("|") == lines[1].count("|") == 10
    assert "seeds 0, 3" in lines[0]
    assert lines[2] == "| exact unrolling: **ceiling** | – | – | 0.988 | 0.98 0.99 | – | – | – | – |"
    assert lines[3] == "| `paper` | sgd proxy, literal | 82,416 | 0.250 | 0.20 0.30 | – | – | – | 1.3 |"
    assert lines[4] == (
        "| `default` (**the default**) | adamw, implicit | 3,056 | 0.750 | 0.70 0.80 | +0.500 [+0.250, +0.625] | 1.2 × | 55 kB | 1.3 |"
    )
    assert "| `a` − `b` | +0.500 [+0.250, +0.750] |" in lines
    assert lines[-1] == "Left out: trak: why."


def test_nothing_is_left_out_without_a_reason() -> None:
    plain = markdown({**FOUND, "failed": [], "contrasts": []})
    assert "Left out" not in plain
    assert "difference" not in plain
