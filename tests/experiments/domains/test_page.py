"""The page of the study of sources shows every matrix, and needs no network."""

from typing import Any

from experiments.domains.page import matrices, page, scatter


def made_up() -> dict[str, Any]:
    """Two seeds, two domains, two methods."""

    def seed(k: int) -> dict[str, Any]:
        truth = [[1.0 + k, -2.0], [0.5, 3.0]]
        return {
            "truth": {"whole": truth, "half": truth},
            "default": {"whole": [[4.0, -8.0], [2.0, 16.0]], "half": [[0.0, 0.0], [0.0, 0.0]]},
            "tracin": {"whole": [[0.0, 0.0], [0.0, 0.0]], "half": truth},
        }

    rows = [{"method": name} for name in ("default", "tracin", "influence-best")]
    return {"setup": {"mode": "<b>scratch"}, "domains": ["law", "books"], "rows": rows, "matrices": [seed(0), seed(1)]}


def test_page_escapes_words_and_holds_its_script() -> None:
    text = page(made_up())
    assert "&lt;b&gt;scratch" in text
    assert "<script src=" not in text
    assert all(name in text for name in ("law", "books", "default", "tracin"))


def test_each_matrix_has_its_own_scale_that_ends_beside_the_diagonal() -> None:
    drawn = matrices(made_up(), ["truth", "default"])
    assert [(trace.zmin, trace.zmax) for trace in drawn.data] == [(-2.0, 2.0), (-8.0, 8.0)]
    assert [list(line) for line in drawn.data[0].z] == [[1.0, -2.0], [0.5, 3.0]]


def test_points_are_all_cells_of_all_seeds() -> None:
    drawn = scatter(made_up(), ["default", "tracin"])
    assert list(drawn.data[0].x) == [1.0, -2.0, 0.5, 3.0, 2.0, -2.0, 0.5, 3.0]
    assert list(drawn.data[0].y) == [0.25, -0.5, 0.125, 1.0] * 2
    assert set(drawn.data[1].y) == {0.0}
