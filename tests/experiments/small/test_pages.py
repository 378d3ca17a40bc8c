"""Pages hold their numbers and need no network."""

from typing import Any

import pytest

from experiments.small import pages

ESTIMATE = {"error": 1e-5, "bound": 1e-2, "influence": 0.1}
FOUND: dict[str, dict[str, Any]] = {
    "limit": {"curves": [{"model": "linear", "points": [{"steps": 10, "ratio": 1.2345678, "error": 0.1}]}]},
    "kinks": {
        "rows": [
            {"activation": "relu", "kind": "all", "factors": [1, 0.1], "gaps": [0.1, 1.2345678], "gaps_seeds": [[0.1, 1.2345678]]}
        ]
    },
    "bound": {
        "constants": {"theorem": 1e42},
        "rows": [{"step": 1, "truth": -1.2345678, "hessian": ESTIMATE, "ggn": ESTIMATE, "empirical": ESTIMATE}],
    },
    "duplicates": {
        "rows": [{"method": "full"}],
        "values": [{"truth": {"early": [0.1], "late": [1.2345678]}, "full": {"early": [0.1], "late": [0.2]}}],
    },
    "ablation": {
        "rows": [{"projection": "learned", "rank": 4, "curvature": "exact:10", "warmup": "20", "bytes": 100, "single": 1.2345678}]
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_a_page_holds_its_numbers(name: str) -> None:
    text = getattr(pages, f"{name}_page")(FOUND[name])
    assert text.startswith("<!doctype html>")
    assert "1.2345678" in text
    assert "Plotly" in text
    assert 'src="http' not in text
    assert ("1e+42" in text) == (name == "bound")
