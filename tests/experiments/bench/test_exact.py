"""The cost of exact results, on something tiny."""

from experiments.bench.exact import bench_exact


def test_costs_are_multiples_of_the_training() -> None:
    result = bench_exact(scale="tiny", repeats=1)
    for part in (result, result["large"]):
        assert part["training_s"] > 0
        assert set(part["reverse"]) == {"1", "4", "16"}
        assert set(part["tangent"]) == {"8"}
        assert 1 < part["reverse"]["1"] < part["reverse"]["16"]
