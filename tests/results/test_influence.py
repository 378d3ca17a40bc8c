"""Reading an answer: by sample, by occurrence, by time, by source; the sums written out by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from backstory.errors import UsageError
from backstory.results.influence import Hit, Influence, RankedSample, SampleIndex, ranking
from backstory.results.quality import Quality
from backstory.results.recording_report import RecordingReport

#                      step     0    0    1    1    2    2
SAMPLES = np.array(["10", "9", "10", "8", "9", "10"])
STEPS = np.array([0, 0, 1, 1, 2, 2])
SCORES = torch.tensor([[1.0, -2.0, 3.0, 0.5, -1.0, -5.0], [0.0, 4.0, 0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
CONTENT = {"10": {"source": "web", "label": "a"}, "9": {"source": "book", "label": None}}


def answer(**changes: Any) -> Influence:
    known: dict[str, Any] = {"scores": SCORES, "sample_ids": SAMPLES, "steps": STEPS, "id_kind": "int", "at": 3,
                             "method": "adjoint", "lookup": lambda *_: CONTENT}  # fmt: skip
    return Influence(**{**known, **changes})


def bare(hits: Sequence[Hit]) -> list[Hit]:
    """Hits without the content of their samples."""
    return [Hit(h.sample, h.step, h.influence, h.occurrences) for h in hits]


def test_samples_are_sums_of_their_occurrences() -> None:
    assert bare(answer().top(2, query=0)) == [Hit(8, 1, 0.5, 1), Hit(10, 2, -1.0, 3)]
    assert bare(answer().bottom(2, query=0)) == [Hit(9, 0, -3.0, 2), Hit(10, 2, -1.0, 3)]
    assert bare(answer().top(99, query=1)) == [Hit(9, 0, 6.0, 2), Hit(8, 1, 1.0, 1), Hit(10, 2, -1.0, 3)]


FACTORS = tuple(float(k) for k in range(1, 21))  # of the twentieths: steps 0, 1, 2 of 3 lie in the first, 7th, 14th
ONE_EACH = torch.tensor([1.0, 1.0, 7.0, 7.0, 14.0, 14.0], dtype=torch.float64)


def test_sizes_over_time_are_corrected_once_and_only_where_they_were_recorded() -> None:
    one = answer(scores=SCORES[:1], quality=Quality(on="x", factors=FACTORS))
    actual = one.corrected()
    torch.testing.assert_close(actual.scores, SCORES[:1] * ONE_EACH)
    assert actual.corrected() is actual
    torch.testing.assert_close(one.between(1, 3).corrected().scores, (SCORES[:1] * ONE_EACH)[:, 2:])
    assert one.by_step().size.tolist() == actual.by_step().size.tolist() == [1.5, 12.25, 42.0]
    assert one.by_step().influence.tolist() == [-1.0, 24.5, -84.0]
    exact = answer(scores=SCORES[:1], quality=Quality(exact=True, on="x", factors=FACTORS))
    assert exact.corrected() is exact
    assert exact.by_step().size.tolist() == [1.5, 1.75, 3.0]
    assert answer(scores=SCORES[:1]).by_step().size.tolist() == [1.5, 1.75, 3.0], "a baseline"


def test_the_mean_of_several_queries_has_factors_of_its_own() -> None:
    both = answer(quality=Quality(on="x", factors=FACTORS), of_mean=Quality(on="y", factors=(2.0,) * 20))
    assert both.by_step("mean").influence.tolist() == [3.0, 4.5, -5.0]
    assert both.corrected().by_step("mean").influence.tolist() == [1.5, 15.75, -35.0], "not once more"
    assert answer(quality=Quality(on="x", factors=FACTORS)).by_step("mean").influence.tolist() == [1.5, 2.25, -2.5]


def test_occurrences_are_as_they_are() -> None:
    assert bare(answer().top(2, query=0, per="occurrence")) == [Hit(10, 1, 3.0), Hit(10, 0, 1.0)]
    assert bare(answer().bottom(2, query=0, per="occurrence")) == [Hit(10, 2, -5.0), Hit(9, 0, -2.0)]


def test_hits_carry_the_content_that_the_run_has_and_their_last_use() -> None:
    samples = answer().top(3, query=1)
    assert [(h.label, h.source, h.text, h.last) for h in samples] == [
        (None, "book", None, 2), (None, None, None, 1), ("a", "web", None, 2),
    ]  # fmt: skip
    assert [h.last for h in answer().top(2, query=0, per="occurrence")] == [1, 0]
    assert answer(lookup=None).top(1, query=0)[0].source is None


def test_both_ends_hold_only_what_helped_and_what_hurt() -> None:
    best, worst = answer().hits(9, query=0)
    assert bare(best) == [Hit(8, 1, 0.5, 1)]
    assert bare(worst) == [Hit(9, 0, -3.0, 2), Hit(10, 2, -1.0, 3)]
    assert answer().hits(1)[0][0].influence == pytest.approx(1.5), "the mean of both queries"
    one = {"sample_ids": np.stack([SAMPLES, SAMPLES]), "steps": np.stack([STEPS, STEPS]), "complete": False, "best": 3}
    assert bare(answer(**one).hits(1)[0]) == [Hit(10, 1, 3.0)]


def test_a_hit_prints_what_is_known_of_it() -> None:
    assert str(Hit(1009, 43, 0.0107)) == "sample 1009  step 43  influence +0.0107"
    assert str(RankedSample(7, 3, -0.01, label="4")) == "sample 7  label 4  step 3  influence -0.0100"
    long = RankedSample("law/7", 3, 1.0, text="Whereas\n\x1b[31mthe " + 40 * "x", source="law")
    assert str(long) == f"sample law/7  source law  step 3  influence +1.00  text “Whereas [31mthe {23 * 'x'}…”"


def test_a_table_of_hits_leaves_out_columns_without_content() -> None:
    assert list(ranking([Hit(1, 0, 0.5)])) == ["sample", "step", "influence"]
    some = [RankedSample(1, 0, 0.5, label="a", text=""), RankedSample(2, 0, 0.5, text="")]
    assert ranking(some) == {"sample": [1, 2], "label": ["a", None], "step": [0, 0], "influence": [0.5, 0.5]}


def test_the_mean_of_queries_is_asked_by_name_and_never_taken_silently() -> None:
    assert answer().top(1, query="mean")[0].influence == pytest.approx(1.5)
    with pytest.raises(UsageError, match=r"the result has 2 queries. Pass query=0 … 1, or query='mean'"):
        answer().top(1)
    for wrong in (2, -1, "sum", 0.5):
        with pytest.raises(UsageError, match="query must be 0 … 1 or 'mean'"):
            answer().top(1, query=wrong)  # type: ignore[arg-type]
    single = answer(scores=SCORES[:1])
    assert single.top(1) == single.top(1, query=0)


def test_groups_are_sums_over_their_samples_and_steps() -> None:
    assert answer().sum_over([10, 8]).tolist() == [-0.5, 0.0]
    assert answer().sum_over([10], steps=[1, 2]).tolist() == [-2.0, -1.0]
    with pytest.raises(UsageError, match="were not used in the steps that this part of a result has"):
        answer().between(0, 1).sum_over([8])
    with pytest.raises(UsageError, match=r"1 of the samples, such as '77', were never used before step 3"):
        answer().sum_over([10, 77])


def test_a_part_of_the_time() -> None:
    part = answer().between(1, 3)
    assert torch.equal(part.scores, SCORES[:, 2:])
    assert bare(part.top(1, query=0)) == [Hit(8, 1, 0.5, 1)]
    assert "steps 1 to 2 only" in part.caveats
    assert answer().between(0, 2).steps.tolist() == [0, 0, 1, 1]
    assert len(answer().between(7, 9)) == 0


def test_per_sample_table() -> None:
    ids, sums = answer().per_sample()
    table = dict(zip(ids, sums.T.tolist(), strict=True))
    assert table == {10: [-1.0, -1.0], 9: [-3.0, 6.0], 8: [0.5, 1.0]}


def test_sources_are_sums_highest_mean_first() -> None:
    by = answer().group_by("source")
    assert list(by) == ["book", "(not given)", "web"]
    assert {k: v.tolist() for k, v in by.items()} == {
        "book": [-3.0, 6.0],
        "(not given)": [0.5, 1.0],
        "web": [-1.0, -1.0],
    }
    assert sum(v.sum() for v in by.values()) == SCORES.sum()
    with pytest.raises(UsageError, match=r"by must be 'source' or 'label', got 'text'"):
        answer().group_by("text")
    with pytest.raises(UsageError, match="has no label for its samples"):
        answer(lookup=None).group_by("label")


def test_pandas() -> None:
    frame = answer().to_pandas()
    assert list(frame.columns) == ["query", "sample", "label", "source", "step", "influence"]
    assert answer().table()["source"] == 2 * ["web", "book", "web", None, "book", "web"]
    assert answer().table()["label"] == 2 * ["a", None, "a", None, None, "a"]
    assert list(answer(lookup=lambda *_: {}).to_pandas().columns) == ["query", "sample", "step", "influence"]
    assert len(frame) == 12
    assert frame[frame["query"] == 0].groupby("sample")["influence"].sum().to_dict() == {10: -1.0, 9: -3.0, 8: 0.5}
    kept = answer(sample_ids=np.stack([SAMPLES, SAMPLES[::-1]]), steps=np.stack([STEPS, STEPS[::-1]]), complete=False)
    assert kept.to_pandas()["sample"].tolist() == [10, 9, 10, 8, 9, 10, 10, 9, 8, 10, 9, 10]
    assert kept.table()["source"][6:] == ["web", "book", None, "web", "book", "web"]


def test_a_table_looks_content_up_once() -> None:
    seen: list[Sequence[str]] = []

    def lookup(ids: Sequence[str], columns: Sequence[str]) -> dict[str, Any]:
        seen.append(ids)
        assert columns == ("label", "source"), "texts and images are not read for a table"
        return CONTENT

    answer(lookup=lookup).table()
    assert seen == [["10", "8", "9"]]


def test_what_was_not_kept_is_not_summed() -> None:
    kept = answer(complete=False)
    for call in (
        lambda: kept.sum_over([10]), lambda: kept.between(0, 1), lambda: kept.per_sample(), lambda: kept.group_by("source"),
        lambda: kept.top(1, query="mean", per="occurrence"), lambda: kept.top(1, query=0, per="sample"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=r"[Qq]uery without keep="):
            call()


def test_the_sign_is_in_words() -> None:
    assert Hit(1, 0, 0.5).words == "helped: without it the loss would be higher"
    assert Hit(1, 0, -0.5).words == "hurt: without it the loss would be lower"
    assert Hit(1, 0, 0.0).words == "had no influence"
    assert Hit(1, 0, 0.5).as_dict()["words"].startswith("helped")
    assert "positive: the sample helped, removing it would raise the query's loss" in repr(
        answer(caveats=("mind this",))
    )
    assert "mind this" in repr(answer(caveats=("mind this",)))


def test_wrong_words_are_refused() -> None:
    cases: list[dict[str, Any]] = [{"k": 0}, {"per": "step"}]
    for wrong in cases:
        with pytest.raises(UsageError, match="k must be at least 1 and per 'sample' or 'occurrence'"):
            answer().top(query=0, **wrong)


def test_text_ids_stay_text() -> None:
    assert answer(id_kind="str").top(1, query=0)[0].sample == "8"


def test_string_ids_are_plain_strings_and_what_is_kept_beside_scores_stays() -> None:
    actual = answer(id_kind="str", recording=RecordingReport(steps=3)).between(0, 2)
    assert {type(h.sample) for h in actual.top(3, query=0, per="occurrence")} == {str}
    assert {type(h.sample) for h in actual.top(3, query=0)} == {str}
    assert actual.recording == RecordingReport(steps=3)


def ties(kind: str, scores: list[float], names: list[str]) -> Influence:
    return answer(
        scores=torch.tensor([scores], dtype=torch.float64), sample_ids=np.array(names), steps=np.arange(len(names)), id_kind=kind,
    )  # fmt: skip


def test_equal_influences_come_in_the_order_of_ids() -> None:
    names = ["20", "3", "100", "1", "5"]
    actual = ties("int", [1.0, 1.0, 1.0, 2.0, 1.0], names)
    assert [h.sample for h in actual.top(3)] == [1, 3, 5]
    assert [h.sample for h in actual.bottom(3)] == [3, 5, 20]
    assert [h.sample for h in actual.bottom(3, per="occurrence")] == [3, 5, 20]
    text = ties("str", [0.0] * 5, names)
    assert [h.sample for h in text.top(4)] == [h.sample for h in text.bottom(4)] == ["1", "100", "20", "3"]
    assert [h.sample for h in ties("str", [0.0] * 5, names[::-1]).top(4)] == ["1", "100", "20", "3"]
    same = ties("int", [1.0] * 3, ["7", "7", "7"])
    assert [h.step for h in same.top(2, per="occurrence")] == [0, 1]


@pytest.mark.parametrize(("n", "k"), [(72, 3), (72, 9), (7, 50), (7, 1)])
def test_both_ends_against_sorting_everything(n: int, k: int) -> None:
    g = np.random.default_rng(n)
    scores, names = g.standard_normal(n), g.integers(0, 20, n).astype(str)
    actual = ties("str", scores.tolist(), names.tolist())
    sums = {name: float(scores[names == name].sum()) for name in set(names.tolist())}
    ranked = sorted(sums, key=lambda name: -sums[name])
    assert [h.sample for h in actual.top(k)] == ranked[:k]
    assert [h.sample for h in actual.bottom(k)] == ranked[::-1][:k]
    for hit in actual.top(k):
        mine = names == hit.sample
        assert hit.occurrences == mine.sum()
        assert hit.influence == pytest.approx(sums[str(hit.sample)])
        assert hit.step == np.flatnonzero(mine)[np.abs(scores[mine]).argmax()]


def test_a_ready_index_may_name_samples_that_did_not_occur_yet() -> None:
    index = SampleIndex(np.array(["10", "7", "8", "9"]), np.array([0, 3, 0, 2, 3, 0]))
    actual = answer(index=index)
    assert [h.sample for h in actual.top(9, query=0)] == [8, 10, 9]
    assert actual.per_sample()[0] == answer().per_sample()[0]
    assert torch.equal(actual.per_sample()[1], answer().per_sample()[1])
    assert [h.sample for h in actual.between(0, 1).top(9, query=0)] == [10, 9]
    with pytest.raises(UsageError, match="'7'"):
        actual.sum_over([7])


def test_one_query_alone() -> None:
    assert torch.equal(answer().only(1).scores, SCORES[1:])
    assert torch.equal(answer().only("mean").scores[0], SCORES.mean(0))
    best = answer(sample_ids=np.stack([SAMPLES, SAMPLES[::-1]]), steps=np.stack([STEPS, STEPS]), complete=False)
    assert best.only(1).sample_ids.tolist() == SAMPLES[::-1].tolist()


def test_the_influence_of_each_step() -> None:
    actual = answer(at=4).by_step(0)
    assert actual.steps.tolist() == [0, 1, 2, 3]
    assert actual.influence.tolist() == [-1.0, 3.5, -6.0, 0.0]
    assert actual.size.tolist() == [1.5, 1.75, 3.0, 0.0]
    assert answer(at=4).draw()["data"][0]["y"] == answer(at=4).by_step("mean").influence.tolist()


def test_the_single_uses_of_a_sample() -> None:
    actual = answer(caveats=("mind this",)).occurrences(10, query=0)
    assert (actual.steps, actual.influence) == ((0, 1, 2), (1.0, 3.0, -5.0))
    assert actual.words[0] == "2 of 3 helped, 1 hurt."
    assert "Its use at step 2 came in the last tenth of training" in actual.words[1]
    assert len(answer(at=100).occurrences(10, query=0).words) == 1
    assert actual.as_dict()["influence"] == [1.0, 3.0, -5.0]
    assert len(actual.to_pandas()) == 3
    assert actual.draw()["data"][0]["y"] == [1.0, 3.0, -5.0]
    assert actual.caveats == ("mind this",)
    with pytest.raises(UsageError, match="'77'"):
        answer().occurrences(77, query=0)


def test_plain_values_of_one_query_or_of_the_mean() -> None:
    actual = answer().as_dict(top=1)
    assert (actual["query"], actual["per"], actual["queries"], actual["method"]) == ("mean", "sample", 2, "adjoint")
    assert actual["hits"] == [bare(answer().top(1, query="mean"))[0].as_dict()]
    assert actual["harmful"] == [bare(answer().bottom(1, query="mean"))[0].as_dict()]
    other = answer().as_dict(top=2, per="occurrence", query=1)
    assert [h["influence"] for h in other["hits"]] == [4.0, 2.0]
    best = answer(sample_ids=np.stack([SAMPLES, SAMPLES]), steps=np.stack([STEPS, STEPS]), complete=False, best=3)
    assert (best.as_dict()["query"], best.as_dict()["per"]) == (0, "occurrence")
