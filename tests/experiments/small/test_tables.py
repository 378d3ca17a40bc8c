"""What the small studies say in words."""

from experiments.small.tables import bound_words


def test_a_bound_that_fails_is_said_to_fail() -> None:
    good = {"held": True, "looseness": 10.0, "against_distance": 0.5, "error_of_truth": 0.01, "bound_of_truth": 2.0}
    names = ("theorem", "proof_chain", "hessian", "ggn", "empirical")
    assert not any("NOT" in line for line in bound_words(dict.fromkeys(names, good)))
    assert "says something" in bound_words(dict.fromkeys(names, good))[0]
    bad = {**good, "held": False, "against_distance": 2.0}
    lines = bound_words(dict.fromkeys(names, bad))
    assert all("did NOT hold" in line for line in lines)
    assert "says nothing" in lines[0]
