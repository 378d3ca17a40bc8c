from experiments.fidelity.text import markdown

FOUND = {
    "seeds": [0, 3],
    "ceiling": {"single": 0.9876, "all": 0.5, "single_seeds": [0.98, 0.99], "all_seeds": [0.4, 0.6]},
    "rows": [
        {
            "method": "paper", "projection": "full", "curvature": "empirical", "optimizer_model": "sgd", "single": 0.25,
            "all": -0.125, "single_seeds": [0.2, 0.3], "all_seeds": [-0.1, -0.15], "seconds": 1.26, "store_bytes": 2.5e9,
        },
        {
            "method": "ours", "projection": "learned", "curvature": "exact", "optimizer_model": "sgd", "single": 0.75,
            "all": 0.5, "single_seeds": [0.7, 0.8], "all_seeds": [0.5, 0.5], "seconds": 3.0, "store_bytes": 0,
            "single_against_paper": {"mean": 0.5, "lower": 0.25, "upper": 0.625},
            "all_against_paper": {"mean": 0.625, "lower": -0.5, "upper": 0.75},
        },
    ],
    "contrasts": [
        {
            "method": "ours", "against": "theirs", "single": {"mean": 0.1, "lower": 0.0, "upper": 0.2},
            "all": {"mean": -0.1, "lower": -0.2, "upper": 0.0},
        }
    ],
    "skipped": ["ekfac: not installed"],
}  # fmt: skip


def test_every_figure_stands_in_its_column() -> None:
    lines = markdown(FOUND).splitlines()
    assert "| exact unrolling: **ceiling** | full | Hessian | – | 0.988 | 0.500 | – | – | – | – |" in lines
    assert "| `paper` | full | empirical | sgd | 0.250 | -0.125 | – | – | 1.3 | 2.5 GB |" in lines
    ours = "| `ours` | learned | exact | sgd | 0.750 | 0.500 | +0.500 [+0.250, +0.625] | +0.625 [-0.500, +0.750] | 3.0 | – |"
    assert ours in lines
    assert "| `ours` − `theirs` | +0.100 [+0.000, +0.200] | -0.100 [-0.200, +0.000] |" in lines
    assert "Each seed (0, 3):" in lines
    assert "| ours | 0.70 0.80 | 0.50 0.50 |" in lines
    assert lines[-1] == "Left out: ekfac: not installed."


def test_without_differences_there_is_no_table_of_them() -> None:
    assert "difference" not in markdown({**FOUND, "contrasts": [], "skipped": []})
