"""Rows in few coordinates against the explicit vec(Lᵀ G R); moments, sides and the shared budget against numpy."""

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tests.support.bases import as_matrix
from tests.support.oracles import assert_close, assert_same
from torch import Tensor

from backstory.maths import projection
from backstory.maths.layers import Dense, Outer, Plain, Sum
from backstory.maths.projection import (
    LONG,
    WIDER,
    WIDEST,
    Basis,
    Shape,
    allocate,
    compact,
    count_sufficient,
    densify,
    energy,
    fix_signs,
    group_edges,
    group_sums,
    learned_basis,
    mask_basis,
    merge,
    moments,
    narrow,
    probes,
    products,
    project,
    project_groups,
    random_basis,
    random_matrix,
    shape_of,
    split_groups,
    widen,
)

B, S, D_OUT, D_IN = 3, 4, 7, 5
SMALL = Shape(D_OUT, D_IN, 3, 2)
WHOLE, NARROW, LOW = Shape(D_OUT, D_IN, D_OUT, D_IN), Shape(D_OUT, D_IN, D_OUT, 2), Shape(D_OUT, D_IN, 3, D_IN)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(D_OUT, shape, generator=torch.Generator().manual_seed(2))


def matrices(outer: Outer) -> Tensor:
    """(B, d_out, d_in): G of each sample, one outer product at a time."""
    left = outer.left if outer.left.is_floating_point() else F.one_hot(outer.left, D_OUT).double()
    return torch.stack(
        [
            torch.stack([torch.outer(l, r) for l, r in zip(ls, rs, strict=True)]).sum(0)
            for ls, rs in zip(left, outer.right, strict=True)
        ]
    )


CONTRIBUTIONS = {
    "one position": Outer(normal(B, 1, D_OUT), normal(B, 1, D_IN, seed=1)),
    "positions": Outer(normal(B, S, D_OUT), normal(B, S, D_IN, seed=1)),
    "tokens": Outer(tokens(B, S), normal(B, S, D_IN, seed=1)),
    "one token": Outer(tokens(B, 1), normal(B, 1, D_IN, seed=1)),
}
BASES = {
    "full": (WHOLE, Basis(None, None)),
    "random": (SMALL, random_basis(SMALL, seed=0, name="layer")),
    "mask": (SMALL, mask_basis(SMALL, seed=0, name="layer")),
    "random, left side whole": (NARROW, random_basis(NARROW, seed=0, name="layer")),
    "mask, right side whole": (LOW, mask_basis(LOW, seed=0, name="layer")),
    "random, with a core": (
        SMALL._replace(core=4),
        random_basis(SMALL, seed=0, name="layer")._replace(core=torch.tensor([4, 0, 5, 2])),
    ),
    "mask, with a core": (
        SMALL._replace(core=3),
        mask_basis(SMALL, seed=0, name="layer")._replace(core=torch.tensor([1, 2, 5])),
    ),
    "full, with a core": (WHOLE._replace(core=2), Basis(None, None, torch.tensor([3, 29]))),
}


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("contribution", CONTRIBUTIONS)
def test_a_row_is_vec_of_left_gradient_right(contribution: str, basis: str) -> None:
    outer, (shape, sides) = CONTRIBUTIONS[contribution], BASES[basis]
    G = matrices(outer)
    L, R = as_matrix(sides.left, D_OUT), as_matrix(sides.right, D_IN)
    expected = torch.stack([(L.T @ g @ R).reshape(-1) for g in G])
    assert expected.shape == (B, shape.product)
    expected = torch.stack([as_matrix(sides.core, shape.product).T @ row for row in expected])
    assert expected.shape == (B, shape.dims)
    causes = "Right numbers in the wrong places: vec is row by row, left side first."
    assert_close(project(outer, shape, sides), expected, 1e-12, causes)
    assert_close(project(Dense(G), shape, sides), expected, 1e-12, causes)


def test_a_convolutions_weight_is_a_matrix_of_patches() -> None:
    G = normal(B, 6, 2, 3, 3)
    shape = shape_of(torch.Size([6, 2, 3, 3]), (4, 5))
    basis = random_basis(shape, seed=0, name="conv")
    assert basis.left is not None
    assert basis.right is not None
    expected = basis.left.double().T @ G.reshape(B, 6, 18) @ basis.right.double()
    assert_close(project(Dense(G), shape, basis), expected.reshape(B, -1), 1e-12)


@pytest.mark.parametrize("kind", ["random", "mask", "learned"])
def test_a_vector_has_one_side(kind: str) -> None:
    g = normal(B, 9)
    shape = Shape(9, 0, 4, 0)
    basis = {
        "random": random_basis(shape, seed=0, name="bias"),
        "mask": mask_basis(shape, seed=0, name="bias"),
        "learned": learned_basis(*moments(Dense(g), shape), shape, seed=0, name="bias"),
    }[kind]
    assert basis.right is None
    assert shape.dims == 4
    assert_close(project(Dense(g), shape, basis), g @ as_matrix(basis.left, 9), 1e-12)


def test_random_inner_products_are_unbiased() -> None:
    shape, draws = Shape(12, 12, 8, 8), 4000
    x = normal(12)
    one = Outer(x.expand(1, 1, 12), x.expand(1, 1, 12))
    other = Outer((x + 0.2 * normal(12, seed=1)).expand(1, 1, 12), x.expand(1, 1, 12))
    total = 0.0
    for seed in range(draws):
        basis = random_basis(shape, seed=seed, name="layer")
        total += (project(one, shape, basis) @ project(other, shape, basis).T).item()
    ratio = total / draws / ((one.left[0, 0] @ other.left[0, 0]) * (x @ x)).item()
    assert abs(ratio - 1) < 0.1, (
        f"projected inner products are {ratio:.3f} x the true ones. 64 would mean a missing 1/sqrt(r) on both sides, "
        "8 on one; 0.44 would mean 1/sqrt(d) on both, 0.02 would mean 1/r; about 1.25 the same seed on both sides."
    )


def test_sides_and_names_and_seeds_are_independent() -> None:
    square = Shape(30, 30, 20, 20)
    sides = [
        side
        for seed in (0, 1)
        for name in ("a", "b")
        for side in random_basis(square, seed=seed, name=name)[:2]
        if side is not None
    ]
    assert len(sides) == 8
    flat = torch.stack([side.flatten() for side in sides])
    correlations = torch.corrcoef(flat).fill_diagonal_(0.0).abs().max().item()
    assert correlations < 0.2, f"two of eight sides correlate with {correlations:.2f}: they share a seed"
    assert not torch.equal(*mask_basis(Shape(99, 99, 9, 9), seed=0, name="a")[:2])  # type: ignore[arg-type]


def test_the_order_of_asking_and_the_global_generator_do_not_matter() -> None:
    first = random_matrix(6, 3, seed=0, name="a")
    torch.manual_seed(123)
    state = torch.get_rng_state()
    random_matrix(6, 3, seed=0, name="b")
    mask_basis(SMALL, seed=0, name="b")
    assert torch.equal(random_matrix(6, 3, seed=0, name="a"), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_numbers_behind_a_name_never_change() -> None:
    """Runs on disk were made with them: a change here orphans every run with a random projection."""
    small, large = (random_matrix(d, 2, seed=0, name="layer.weight/left")[:2] for d in (2, 8))
    assert_close(small, torch.tensor([[0.0789732, -0.5911675], [-0.1956660, -0.3575578]]), 1e-6)
    assert_close(
        large, torch.tensor([[0.8399238, 1.3200969], [0.9883263, 0.1618265]]), 1e-6
    )  # from 16 numbers on, torch draws in another order


def test_a_mask_picks_coordinates() -> None:
    basis = mask_basis(SMALL, seed=0, name="layer")
    G = normal(B, D_OUT, D_IN)
    assert basis.left is not None
    assert basis.right is not None
    assert len(set(basis.left.tolist())) == 3
    assert basis.left.tolist() == sorted(basis.left.tolist())
    expected = [[g[i, j] for i in basis.left for j in basis.right] for g in G]
    assert torch.equal(project(Dense(G), SMALL, basis), torch.tensor(expected, dtype=torch.float64))


def explicit_moments(G: Tensor) -> tuple[Tensor, Tensor]:
    return torch.stack([g @ g.T for g in G]).sum(0), torch.stack([g.T @ g for g in G]).sum(0)


@pytest.mark.parametrize("contribution", CONTRIBUTIONS)
def test_moments_are_sums_of_squares_of_whole_gradients(contribution: str) -> None:
    outer = CONTRIBUTIONS[contribution]
    G = matrices(outer)
    causes = "Positions must be summed before squaring: Σδδᵀ‖a‖² is not GGᵀ."
    for result in (moments(outer, SMALL), moments(Dense(G), SMALL)):
        for actual, expected in zip(result, explicit_moments(G), strict=True):
            assert actual is not None
            assert_close(actual, expected, 1e-12, causes)


def test_a_side_kept_whole_needs_no_moment() -> None:
    outer = CONTRIBUTIONS["positions"]
    assert moments(outer, WHOLE) == (None, None)
    left, right = moments(outer, Shape(D_OUT, D_IN, D_OUT, 2))
    assert left is None
    assert right is not None


@pytest.mark.parametrize("contribution", CONTRIBUTIONS)
def test_a_side_that_is_turned_needs_its_moment_though_it_keeps_everything(contribution: str) -> None:
    outer = CONTRIBUTIONS[contribution]
    G = matrices(outer)
    for shape in (WHOLE, NARROW, LOW, SMALL):
        for result in (moments(outer, shape, turned=True), moments(Dense(G), shape, turned=True)):
            for actual, expected in zip(result, explicit_moments(G), strict=True):
                assert actual is not None
                assert_close(actual, expected, 1e-12)


def test_a_vector_is_turned_on_its_one_side() -> None:
    g = normal(B, 9)
    for part, rows in ((Dense(g), g), (Sum(normal(B, S, 9)), normal(B, S, 9).sum(1))):
        left, right = moments(part, Shape(9, 0, 9, 0), turned=True)
        assert right is None
        assert left is not None
        assert_close(left, torch.stack([torch.outer(x, x) for x in rows]).sum(0), 1e-12)
    assert moments(Dense(g), Shape(9, 0, 9, 0)) == (None, None)


def test_a_vocabulary_never_gets_a_moment_but_a_sketch() -> None:
    words, rank = LONG + 1, 3
    shape, g = Shape(words, D_IN, rank, 2), torch.Generator().manual_seed(5)
    few = torch.randperm(words, generator=g)[:rank]  # the tokens that occur, besides rare ones
    index = torch.where(torch.rand(40, S, generator=g) < 0.9, few[torch.randint(rank, (40, S), generator=g)], 7)
    a = normal(40, S, D_IN)
    omegas = probes(shape, seed=0, name="embedding")
    assert omegas[1] is None
    dense = F.one_hot(index, words).double()
    explicit = torch.einsum("bsi,bsj->bij", dense, a)
    for part in (Outer(index, a), Outer(dense, a), Dense(explicit)):
        left, right = moments(part, shape, omegas)
        assert left is not None
        assert left.shape == (words, 2 * rank)
        basis = learned_basis(left, right, shape, omegas, seed=0, name="embedding")
        assert basis.left is not None
        assert_close(basis.left.T @ basis.left, torch.eye(rank, dtype=torch.float64), 1e-9)
        U = torch.from_numpy(np.linalg.svd(explicit.transpose(0, 1).flatten(1).numpy(), full_matrices=False)[0])
        assert_close((basis.left.T @ U[:, :rank]).norm(), torch.tensor(rank**0.5).double(), 1e-6, "another projection")


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_a_long_side_of_low_rank_is_found_in_float32(rank: int) -> None:
    """Fewer rows than probes: Y holds its own rounding, and Ωᵀ Y is positive only above it."""
    d, shape = LONG + 76, Shape(LONG + 76, D_IN, 16, 2)
    g = torch.Generator().manual_seed(rank)
    left, few = torch.randn(rank, d, generator=g), torch.randn(12, S, rank, generator=g)
    part, omegas = Outer(few @ left, torch.randn(12, S, D_IN, generator=g)), probes(shape, seed=0, name="head")
    basis = learned_basis(*moments(part, shape, omegas), shape, omegas, seed=0, name="head")
    assert basis.left is not None
    held = (left @ basis.left).norm() / left.norm()
    assert held > (0.999 if rank <= 16 else 0.8)
    assert_close(basis.left.T @ basis.left, torch.eye(16), 1e-5)


def test_a_side_that_no_row_has_reached_gets_seeded_coordinates() -> None:
    result, spare = learned_basis(None, None, SMALL, seed=0, name="layer"), random_basis(SMALL, seed=0, name="layer")
    assert all(torch.equal(x, y) for x, y in zip(result[:2], spare[:2], strict=True) if x is not None and y is not None)
    assert result.left is not None


@pytest.mark.parametrize("shape", [SMALL, WHOLE, NARROW], ids=["both sides", "turned only", "one of each"])
def test_a_learned_basis_holds_the_top_eigenvectors(shape: Shape) -> None:
    outer = Outer(normal(20, S, D_OUT), normal(20, S, D_IN, seed=1))
    basis = learned_basis(*moments(outer, shape, turned=True), shape, seed=0, name="layer")
    ranks = (shape.r_out, shape.r_in)
    for side, moment, r in zip(basis[:2], explicit_moments(matrices(outer)), ranks, strict=True):
        assert side is not None
        assert side.shape == (len(moment), r)
        assert_close(side.T @ side, torch.eye(r, dtype=torch.float64), 1e-12, "not orthonormal")
        vectors = torch.from_numpy(np.linalg.svd(moment.numpy())[0])[:, :r]  # largest first
        signs = (vectors * side).sum(0).sign()
        assert_close(side, vectors * signs, 1e-9, "The smallest, or in the wrong order?")
        assert torch.equal(fix_signs(-side), side), "signs are not fixed"


def test_a_learned_basis_does_not_count_data_twice() -> None:
    outer = Outer(normal(20, S, D_OUT), normal(20, S, D_IN, seed=1))
    twice = Outer(outer.left.repeat(2, 1, 1), outer.right.repeat(2, 1, 1))
    once = learned_basis(*moments(outer, SMALL), SMALL, seed=0, name="layer")
    again = learned_basis(*moments(twice, SMALL), SMALL, seed=0, name="layer")
    for one, other in zip(once[:2], again[:2], strict=True):
        assert one is not None
        assert other is not None
        assert_close(other, one, 1e-10)


MIXES = {
    "factors": ("positions", "one position"),
    "tokens": ("tokens", "one token"),
    "a tied embedding": ("tokens", "positions"),
}


@pytest.mark.parametrize("parts", MIXES.values(), ids=MIXES)
def test_calls_of_one_parameter_add_up_before_anything_is_squared(parts: tuple[str, str]) -> None:
    outers = [CONTRIBUTIONS[name] for name in parts]
    G = matrices(outers[0]) + matrices(outers[1])
    basis = random_basis(SMALL, seed=0, name="tied")
    for result in (merge(outers, SMALL), merge([outers[0], Dense(matrices(outers[1]))], SMALL)):
        assert_close(densify(result, SMALL), G, 1e-12)
        assert_close(project(result, SMALL, basis), project(Dense(G), SMALL, basis), 1e-12)
        for actual, expected in zip(moments(result, SMALL), explicit_moments(G), strict=True):
            assert actual is not None
            assert_close(actual, expected, 1e-12, "Squares of calls were added, not calls.")
    assert merge(outers[:1], SMALL) is outers[0]


def test_vectors_called_twice_add_up() -> None:
    g, shape = normal(2, B, 9), Shape(9, 0, 4, 0)
    merged = merge([Dense(g[0]), Dense(g[1])], shape)
    assert_close(densify(merged, shape), g[0] + g[1], 1e-14)


def test_positions_of_a_vector_stay_apart_until_they_meet_something_else() -> None:
    shape, one, other = Shape(9, 0, 4, 0), Sum(normal(B, S, 9)), Sum(normal(B, 2, 9, seed=1))
    whole = one.values.sum(1) + other.values.sum(1)
    assert_close(densify(one, shape), one.values.sum(1), 1e-14)
    merged = merge([one, other], shape)
    assert isinstance(merged, Sum)
    assert merged.values.shape == (B, S + 2, 9)
    assert_close(densify(merged, shape), whole, 1e-14)
    assert_close(densify(merge([one, Dense(other.values.sum(1))], shape), shape), whole, 1e-14)
    basis = learned_basis(*moments(merged, shape), shape, seed=0, name="bias")
    assert_close(project(merged, shape, basis), whole @ as_matrix(basis.left, 9), 1e-12)
    left, right = moments(merged, shape)
    assert right is None
    assert left is not None
    causes = "Positions must be summed before squaring."
    assert_close(left, torch.stack([torch.outer(g, g) for g in whole]).sum(0), 1e-12, causes)
    small = compact(merged, shape)
    assert isinstance(small, Dense)
    assert_close(small.grads, whole, 1e-14)


@pytest.mark.parametrize(("positions", "smaller"), [(2, Outer), (3, Dense)])
def test_the_smaller_of_factors_and_gradient_is_kept(positions: int, smaller: type) -> None:
    """S (d_out + d_in) numbers against d_out · d_in: here 12 S against 35."""
    outer = Outer(normal(B, positions, D_OUT), normal(B, positions, D_IN, seed=1))
    result = compact(outer, SMALL)
    assert isinstance(result, smaller)
    assert_close(densify(result, SMALL), matrices(outer), 1e-12)
    assert compact(result, SMALL) is result


SHAPES = {
    "matrix": ((7, 5), (3, 2), Shape(7, 5, 3, 2)),
    "convolution": ((6, 2, 3, 3), (4, 5), Shape(6, 18, 4, 5)),
    "rank above the size": ((7, 5), (100, 2), Shape(7, 5, 7, 2)),
    "everything": ((7, 5), None, Shape(7, 5, 7, 5)),
    "vector": ((100,), (8, 4), Shape(100, 0, 32, 0)),
    "short vector": ((5,), (8, 4), Shape(5, 0, 5, 0)),
    "whole vector": ((100,), None, Shape(100, 0, 100, 0)),
    "scalar": ((), (8, 4), Shape(1, 0, 1, 0)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shape_of(name: str) -> None:
    size, rank, expected = SHAPES[name]
    result = shape_of(torch.Size(size), rank)
    assert result == expected
    assert result.dims == expected.r_out * max(1, expected.r_in)


def test_the_kinds_are_known_by_these_names() -> None:
    assert projection.KINDS == ("learned", "random", "mask", "full")


# groups of positions

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


@EXAMPLES
@given(st.integers(0, 40), st.integers(1, 12))
def test_groups_cut_the_positions_in_order_into_nearly_equal_parts(positions: int, groups: int) -> None:
    edges = group_edges(positions, groups)
    assert [t for lo, hi in edges for t in range(lo, hi)] == list(range(positions))
    assert len(edges) == groups
    sizes = {hi - lo for lo, hi in edges}
    assert max(sizes) - min(sizes) <= 1
    for k, (lo, hi) in enumerate(edges):  # the module's formula, in whole numbers
        assert all(k == -(-(t + 1) * groups // positions) - 1 for t in range(lo, hi))


def part_of(kind: str, positions: int, seed: int) -> tuple[Plain, Shape]:
    vector, left = Shape(D_OUT, 0, 3, 0), normal(B, positions, D_OUT, seed=seed)
    right = normal(B, positions, D_IN, seed=seed + 1)
    result: dict[str, tuple[Plain, Shape]] = {
        "factors": (Outer(left, right), SMALL),
        "tokens": (Outer(tokens(B, positions), right), SMALL),
        "sum": (Sum(left), vector),
        "dense vector": (Dense(left[:, 0]), vector),
        "dense matrix": (Dense(left[:, 0, :, None] * right[:, 0, None]), SMALL),
    }
    return result[kind]


def by_group(part: Plain, groups: int) -> list[Tensor]:
    """Gradients written out, position by position, each added to the group that it is in: K of (B, *shape)."""
    if isinstance(part, Dense):
        return [*[torch.zeros_like(part.grads)] * (groups - 1), part.grads]
    S = part[-1].shape[1]
    each = (
        [matrices(Outer(part.left[:, t : t + 1], part.right[:, t : t + 1])) for t in range(S)]
        if isinstance(part, Outer)
        else list(part.values.unbind(1))
    )
    out = [torch.zeros_like(each[0]) for _ in range(groups)]
    for t, gradient in enumerate(each):
        k = next(k for k in range(groups) if k * S // groups <= t < (k + 1) * S // groups)
        out[k] = out[k] + gradient
    return out


PARTS = st.sampled_from(["factors", "tokens", "sum", "dense vector", "dense matrix"])
SIDED = st.sampled_from(["full", "random", "mask", "core"])


def basis_of(kind: str, shape: Shape) -> tuple[Shape, Basis]:
    if kind == "full":
        return shape._replace(r_out=shape.d_out, r_in=shape.d_in), Basis(None, None)
    if kind == "core":
        sides = random_basis(shape, seed=0, name="layer")
        chosen = torch.randperm(shape.product, generator=torch.Generator().manual_seed(8))[:2]
        return shape._replace(core=2), sides._replace(core=chosen)
    return shape, (random_basis if kind == "random" else mask_basis)(shape, seed=0, name="layer")


@EXAMPLES
@example("factors", "random", 6, 2, 0)
@example("tokens", "mask", 6, 3, 0)
@example("sum", "random", 6, 2, 0)
@example("factors", "full", 2, 5, 0)
@example("factors", "core", 6, 2, 0)
@example("factors", "core", 5, 2, 0)
@example("sum", "core", 6, 2, 0)
@given(PARTS, SIDED, st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_groups_are_projected_each_as_if_alone(kind: str, sides: str, positions: int, groups: int, seed: int) -> None:
    """Positions that divide evenly, that do not, and fewer positions than groups; what has none goes to the last."""
    part, shape = part_of(kind, positions, seed)
    shape, basis = basis_of(sides, shape)
    result = project_groups(part, shape, basis, groups)
    assert result.shape == (B, groups, shape.dims)
    expected = [project(Dense(G), shape, basis) for G in by_group(part, groups)]
    assert_close(result, torch.stack(expected, 1), 1e-12, "A group's positions, or vec(LᵀGR), in the wrong order.")
    assert_close(result.sum(1), project(part, shape, basis), 1e-12, "The groups do not add up to the gradient.")


@EXAMPLES
@example("factors", 6, 2, 0)
@example("tokens", 6, 3, 0)
@example("sum", 6, 2, 0)
@example("factors", 2, 5, 0)
@given(PARTS, st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_split_groups_are_the_same_groups(kind: str, positions: int, groups: int, seed: int) -> None:
    part, shape = part_of(kind, positions, seed)
    pieces = split_groups(part, groups)
    assert len(pieces) == groups
    for piece, expected in zip(pieces, by_group(part, groups), strict=True):
        if piece is None:
            assert not expected.any()
        else:
            assert type(piece) is type(part)
            assert piece[-1].shape[1] > 0
            assert_close(densify(piece, shape), expected, 1e-12)


@EXAMPLES
@example("factors", 6, 2, 0)
@example("tokens", 6, 3, 0)
@example("sum", 6, 2, 0)
@example("factors", 2, 5, 0)
@given(PARTS, st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_products_are_inner_products_of_whole_gradients(kind: str, positions: int, groups: int, seed: int) -> None:
    part, shape = part_of(kind, positions, seed)
    whole = normal(D_OUT, D_IN, seed=5) if shape.d_in else normal(D_OUT, seed=5)
    expected = [[(g * whole).sum() for g in G] for G in by_group(part, groups)]
    result = products(part, whole, shape, groups)
    assert_close(result.T, torch.tensor(expected, dtype=torch.float64), 1e-11, "A transposed or shared product.")


@pytest.mark.parametrize("groups", [1, 2, 3, 7])
def test_sums_of_groups_keep_what_follows_the_positions(groups: int) -> None:
    for shape in ((B, 6), (B, 6, 2), (B, 6, 2, 3), (B, 1, 2)):
        x = normal(*shape)
        S = shape[1]
        ends = [k * S // groups for k in range(groups + 1)]
        expected = [
            [sum((row[t] for t in range(ends[k], ends[k + 1])), torch.zeros(shape[2:]).double()) for k in range(groups)]
            for row in x
        ]
        result = group_sums(x, groups)
        assert result.shape == (B, groups, *shape[2:])
        assert_close(result, torch.stack([torch.stack(row) for row in expected]), 1e-13)


def test_a_convolutions_weight_meets_its_gradient_as_a_matrix() -> None:
    """`whole` comes as the parameter is, (C_out, C_in, k, k); the factors are those of patches."""
    shape = shape_of(torch.Size([6, 2, 3, 3]), None)
    part = Outer(normal(B, S, 6), normal(B, S, 18, seed=1))
    whole = normal(6, 2, 3, 3, seed=2)
    expected = torch.einsum("bso,bsi,oi->b", part.left, part.right, whole.reshape(6, 18))
    assert_close(products(part, whole, shape, 2).sum(1), expected, 1e-12)
    G = torch.einsum("bso,bsi->boi", part.left, part.right).reshape(B, 6, 2, 3, 3)
    assert_close(products(Dense(G), whole, shape, 2)[:, -1], expected, 1e-12)


@pytest.mark.parametrize(
    ("shape", "times", "expected"),
    [
        (Shape(100, 80, 16, 16), WIDER, Shape(100, 80, 24, 24)),
        (Shape(100, 80, 4, 9), WIDER, Shape(100, 80, 6, 14)),
        (Shape(100, 80, 1, 3), WIDER, Shape(100, 80, 2, 5)),
        (Shape(20, 80, 16, 16), WIDER, Shape(20, 80, 20, 24)),
        (Shape(10, 3, 10, 3), WIDER, Shape(10, 3, 10, 3)),
        (Shape(100, 80, 16, 16, 200), WIDER, Shape(100, 80, 24, 24)),
        (Shape(100, 0, 64, 0), WIDER, Shape(100, 0, 64, 0)),
        (Shape(100, 0, 64, 0, 30), WIDER, Shape(100, 0, 64, 0)),
        (Shape(100, 80, 16, 5), WIDEST, Shape(100, 80, 48, 15)),
        (Shape(20, 80, 16, 16, 7), WIDEST, Shape(20, 80, 20, 48)),
        (Shape(100, 0, 64, 0), WIDEST, Shape(100, 0, 64, 0)),
    ],
)
def test_sides_are_wider_and_no_wider_than_the_parameter(shape: Shape, times: float, expected: Shape) -> None:
    """Half as wide again, rounded up, or three times as wide; what a core kept before is forgotten."""
    assert widen(shape, times) == expected
    assert times != WIDER or widen(shape) == expected


def sized(*dims: int) -> list[Shape]:
    """Parameters that keep so many numbers: by turns vectors, matrices, and the choice of a core."""
    kinds = [lambda d: Shape(d + 1, 0, d, 0), lambda d: Shape(9, d, 1, d), lambda d: Shape(9, d, 3, d, d)]
    return [kinds[b % 3](d) for b, d in enumerate(dims)]


DIMS = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(DIMS, st.integers(1, 250))
@example([3, 1, 2], 1)
@example([5, 5, 5, 5], 6)
def test_a_bound_on_all_coordinates_is_used_up_in_proportion(dims: list[int], most: int) -> None:
    """What is beyond the first of each is cut by one ratio; what rounding down leaves goes to those that lose most."""
    assume(sum(dims) > len(dims))
    shapes = sized(*dims)
    result = narrow(shapes, most)
    kept = [shape.dims for shape in result]
    if sum(dims) <= most:
        assert result == shapes
        return
    assert [x._replace(core=0) for x in result] == [x._replace(core=0) for x in shapes], "only cores differ"
    assert sum(kept) == max(most, len(dims)), "one each is the least"
    ratio = Fraction(sum(kept) - len(dims), sum(dims) - len(dims))
    exact = [1 + ratio * (d - 1) for d in dims]
    assert all(1 <= k <= d for k, d in zip(kept, dims, strict=True))
    down = [int(x) for x in exact]
    more = [k - x for k, x in zip(kept, down, strict=True)]
    assert set(more) <= {0, 1}
    lost = [(d - x, -b) for b, (d, x) in enumerate(zip(dims, down, strict=True))]  # of equal losses, the first
    served = [x for x, extra in zip(lost, more, strict=True) if extra]
    assert sorted(served) == sorted(lost)[len(lost) - len(served) :]


@pytest.mark.parametrize(
    ("dims", "most", "expected"),
    [
        ([10, 20, 30], 60, [10, 20, 30]),
        ([10, 20, 30], 59, [10, 20, 29]),
        ([10, 20, 30], 33, [5, 11, 17]),
        ([30, 20, 10], 33, [17, 11, 5]),
        ([4, 4, 4], 7, [3, 2, 2]),
        ([1, 100, 1], 12, [1, 10, 1]),
        ([7, 9], 1, [1, 1]),
    ],
)
def test_bounds_worked_out_by_hand(dims: list[int], most: int, expected: list[int]) -> None:
    assert [shape.dims for shape in narrow(sized(*dims), most)] == expected


def test_a_bound_below_the_number_of_parameters_leaves_one_each() -> None:
    assert [shape.dims for shape in narrow(sized(1, 1, 1), 2)] == [1, 1, 1]


@pytest.mark.parametrize("ends", [(1.0, -1.0), (-1.0, 1.0), (2.0, -1.0, -1.0), (1.0, 0.0, 0.0, -1.0)])
def test_rounding_does_not_decide_a_sign(ends: tuple[float, ...]) -> None:
    """Gradients of two classes' biases are (1, −1) times something: neither entry is the largest."""
    vector = torch.tensor(ends, dtype=torch.float64)[:, None]
    near = torch.cat([vector * (1 + 1e-15 * torch.eye(len(vector), dtype=torch.float64)), vector], 1)
    for result in (fix_signs(near), fix_signs(-near)):
        assert_same(result, fix_signs(vector).expand_as(near), 20)


ENERGIES = st.lists(
    st.lists(st.integers(0, 6), min_size=1, max_size=4).map(lambda v: sorted(v, reverse=True)), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(ENERGIES, st.data())
def test_no_other_way_of_sharing_holds_more(values: list[list[int]], data: st.DataObject) -> None:
    budget = data.draw(st.integers(len(values), sum(map(len, values))))
    result = allocate([torch.tensor(v, dtype=torch.float64) for v in values], budget)
    ways = [way for way in product(*(range(1, len(v) + 1) for v in values)) if sum(way) == budget]
    assert tuple(result) in ways, "at least one each, no more than there are, the budget in all"
    energy = {way: sum(sum(v[:k]) for v, k in zip(values, way, strict=True)) for way in ways}
    assert energy[tuple(result)] == max(energy.values())


def test_of_equal_energies_the_first_parameters_come_first() -> None:
    ones = torch.ones(3, dtype=torch.float64)
    assert allocate([ones, ones, ones], 6) == [3, 2, 1]
    many = [torch.ones(40, dtype=torch.float64)] * 3  # more than a sort that is stable by chance would keep in order
    assert allocate(many, 70) == [40, 29, 1]


@pytest.mark.parametrize("budget", [1, 6])
def test_a_budget_that_cannot_be_shared_out_is_refused(budget: int) -> None:
    with pytest.raises(ValueError, match=rf"between 2 .* and 5 coordinates, got {budget} for sizes \[2, 3\]"):
        allocate([torch.ones(2), torch.ones(3)], budget)


@settings(max_examples=200, deadline=None)
@given(ENERGIES, st.floats(0.01, 1.2), st.integers(0, 16))
def test_no_fewer_coordinates_hold_the_energy(values: list[list[int]], share: float, more: int) -> None:
    """Against every way of keeping some of each, in whole numbers, so that nothing is rounded."""
    wanted, most = share * sum(map(sum, values)), len(values) + more
    result = count_sufficient([torch.tensor(v, dtype=torch.float64) for v in values], wanted, most)
    ways = list(product(*(range(1, len(v) + 1) for v in values)))
    enough = [sum(w) for w in ways if sum(sum(v[:k]) for v, k in zip(values, w, strict=True)) >= wanted]
    useful = sum(max(1, sum(x > 0 for x in v)) for v in values)  # all that is not zero, and one of each
    assert result == min([most, min(enough) if enough else useful])


def test_rounding_is_not_taken_for_energy() -> None:
    """Half of the energy lies outside of all sides: what is kept ends where the rest is noise."""
    values = torch.tensor([4.0, 1.0, 1e-8, 1e-9], dtype=torch.float64)
    assert count_sufficient([values], 10.0, 4) == 2
    assert count_sufficient([values], 5.0 + 1e-8, 4) == 3, "where they do add up to it, they are taken"


@pytest.mark.parametrize("kind", ["outer", "tokens", "dense", "vector", "sum"])
def test_energy_is_the_sum_of_squares_of_whole_gradients(kind: str) -> None:
    g = torch.Generator().manual_seed(1)
    left, right = (torch.randn(3, 4, d, generator=g, dtype=torch.float64) for d in (5, 6))
    tokens = torch.tensor([[1, 4, 1, 1], [0, 0, 2, 3], [3, 3, 3, 3]])
    matrix, vector = Shape(5, 6, 2, 2), Shape(5, 0, 5, 0)
    hot = torch.zeros(3, 4, 5, dtype=torch.float64).scatter_(2, tokens[:, :, None], 1.0)
    cases: dict[str, tuple[Plain, Shape, Tensor]] = {
        "outer": (Outer(left, right), matrix, torch.einsum("bti,btj->bij", left, right)),
        "tokens": (Outer(tokens, right), matrix, torch.einsum("bti,btj->bij", hot, right)),
        "dense": (Dense(right.reshape(3, 24)[:, :18]), Shape(3, 6, 2, 2), right.reshape(3, 24)[:, :18]),
        "vector": (Dense(left[:, 0]), vector, left[:, 0]),
        "sum": (Sum(left), vector, left.sum(1)),
    }
    part, shape, G = cases[kind]
    assert energy(part, shape) == pytest.approx(float(G.square().sum()), rel=1e-12)
