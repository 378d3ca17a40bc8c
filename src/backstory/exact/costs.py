"""What the exact ways cost, in multiples of the plain training's time.

Measured on a small GPT trained from scratch, in float32 on a CPU, with the replay (`python -m experiments bench exact`); other models
differ by a quarter or so. Reverse sweeps of 1, 4, 16 queries: 4.4, 10, 34; tangents of 8 parts: 11; 8 sources left out, with 3 twins: 12.
Where nearly all is matrix products (GPT 4 × 128): 4.2, 9.9, 34; 9.5; 13.
"""

BLOCK = 16  # queries whose sweeps share one replay
REPLAY, SWEEP = 2.4, 2.0  # of a block of queries: its replay with what it writes; one query's way back
TWINS = 3  # trainings that differ by rounding, to know the noise
TANGENT = 1.15  # one group's way forward beside the replay


def reverse(queries: int, share: float = 1.0) -> float:
    """Exact influence of all occurrences on some queries, or of those in the last `share` of the steps."""
    blocks = -(-queries // BLOCK)
    return REPLAY * blocks + SWEEP * queries * share


def leave_out(groups: int, share: float = 1.0) -> float:
    """Training again without each group, from its first use on: on average over `share` of the steps; with twins and one replay."""
    return groups * share + TWINS + 1


def tangent(groups: int) -> float:
    """The first-order effect of each group, forward, beside one replay."""
    return 1 + TANGENT * groups


def calibrate(queries: int, removals: int) -> float:
    """A sweep of each query, and single uses left out: on average over half of the steps."""
    return reverse(queries) + (leave_out(removals, 0.5) if removals else 0)


def exact_costs() -> dict[str, dict[int, float]]:
    """Of each way for some numbers of queries or groups: what a plan shows."""
    return {
        "reverse": {queries: reverse(queries) for queries in (1, 4, 16)},
        "leave_out": {8: leave_out(8)},
        "tangent": {8: tangent(8)},
    }
