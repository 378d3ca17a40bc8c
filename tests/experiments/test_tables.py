from experiments import tables


def test_cells_and_tables() -> None:
    assert tables.bounded(0.5, {"lower": 0.25, "upper": 0.75}) == "0.500 [0.250, 0.750]"
    assert tables.signed({"mean": -0.1, "lower": -0.2, "upper": 0.0}) == "-0.100 [-0.200, +0.000]"
    assert tables.signed(None) == tables.number(None, ".1f") == tables.size(0) == "–"
    assert (tables.size(2.5e9), tables.size(2.5e6)) == ("2.5 GB", "2.5 MB")
    assert tables.each([0.123, 1]) == "0.12 1.00"
    assert tables.markdown(("a", "b"), [(1, "x"), (2, "y")]) == "| a | b |\n|---|---|\n| 1 | x |\n| 2 | y |"
