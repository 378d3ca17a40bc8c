"""Asking by an index: what it finds has its true influence, it says what it misses, and it is never of other embeddings."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.loops import FULL, batch_of, cross_entropy, mlp, normal, same_report, seeded, sgd, train
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

import backstory
from backstory.errors import StoreError, UsageError
from backstory.run import index as module
from backstory.run.index import _recalls, _tuned, labels
from backstory.store import RunStore

STEPS, SIZE = 30, 9
ROWS = STEPS * SIZE


def recorded(path: Path, **settings: Any) -> tuple[backstory.Run, nn.Module]:
    model = mlp()
    train(path, model, sgd(model, 0.05, momentum=0.5), STEPS, size=SIZE, **settings)
    return backstory.open(path), model


def indexed(path: Path, **settings: Any) -> tuple[backstory.Run, nn.Module]:
    run, model = recorded(path, **settings)
    run.embed(encoding="float64", dtype=torch.float64)
    run.build_index(queries=5)
    return run, model


@pytest.mark.parametrize("curvature", ["empirical", "empirical/1"])
def test_the_highest_and_the_lowest_with_their_true_influence(curvature: str, tmp_path: Path) -> None:
    """Against products written out in numpy: nearly all are found, and what is found is exact."""
    run, _ = indexed(tmp_path / "run", curvature=curvature)
    E = run.store.read_embeddings(STEPS, 0, ROWS, dtype=torch.float64).numpy()
    v = normal(4, run.store.width, seed=8)
    answer, k = run.query_gradients(v, method="index", keep=7), 7
    assert (answer.method, answer.complete, answer.kept) == ("index", False, k)
    assert answer.scores.shape == (4, 2 * k)
    true = v.numpy() @ E.T  # (4, N)
    samples, steps = run.query_gradients(v).sample_ids, run.query_gradients(v).steps
    missed = 0
    for q in range(4):
        order = np.argsort(-true[q], kind="stable")
        assert_close(answer.scores[q], torch.from_numpy(np.sort(answer.scores[q].numpy())[::-1].copy()), 0.0)
        found = set(zip(answer.sample_ids[q].tolist(), answer.steps[q].tolist(), strict=True))
        for end in (order[:k], order[-k:]):
            wanted = {(samples[i], int(steps[i])) for i in end}
            missed += len(wanted - found)
        exact = {(samples[i], int(steps[i])): true[q, i] for i in range(ROWS)}
        for sample, step, score in zip(answer.sample_ids[q], answer.steps[q], answer.scores[q].tolist(), strict=True):
            assert score == pytest.approx(exact[(sample, int(step))], rel=1e-9, abs=1e-15)
    assert missed <= 14, f"{missed} of 56 are missed; Lance draws the partitions anew each time"
    top, bottom = answer.top(1, query=0, per="occurrence")[0], answer.bottom(1, query=0, per="occurrence")[0]
    assert top.influence > 0 > bottom.influence


def test_a_question_to_the_model(tmp_path: Path) -> None:
    run, model = indexed(tmp_path / "run")
    asked = run.query(model, cross_entropy, batch_of([3, 40]), method="index", keep=5)
    exact = run.query(model, cross_entropy, batch_of([3, 40]), method="embeddings", keep=5)
    assert_close(asked.scores[:, [0, -1]], exact.scores[:, [0, -1]], 1e-6)
    same_report(asked.quality, exact.quality)
    assert asked.id_kind == exact.id_kind
    said = [note for note in asked.notes if "approximate index" in note]
    assert len(said) == 1
    assert "of the 10 highest and" in said[0]
    assert not [note for note in exact.notes if "index" in note]
    assert "by index" in repr(asked)


def test_an_index_is_asked_by_its_name_only(tmp_path: Path) -> None:
    run, _ = indexed(tmp_path / "run")
    v = normal(1, run.store.width, seed=8)
    assert run.query_gradients(v, keep=3).method == "embeddings"
    assert run.query_gradients(v, keep=3, method="embeddings").method == "embeddings"


def test_the_report_and_its_recall(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run")
    run.embed(encoding="float64", dtype=torch.float64)
    said: list[tuple[int, int]] = []
    report = run.build_index(queries=12, seed=4, progress=lambda done, total: said.append((done, total)))
    drawn = sorted(set(torch.randint(ROWS, (12,), generator=torch.Generator().manual_seed(4)).tolist()))
    assert (report.at, report.occurrences, report.dims, report.k) == (STEPS, ROWS, run.store.width, 10)
    assert (report.queries, report.partitions, report.probes) == (len(drawn), 1, 1)
    assert said[-1] == (ROWS, ROWS)
    assert report.bytes == run.store.index_bytes(STEPS)
    assert report.as_dict()["seconds"] > 0
    G, E = (x.double().numpy() for x in (every_row(run.store), run.embeddings()))
    hits = np.zeros(2)
    for row in drawn:
        true = E @ G[row]
        answer = run.query_gradients(torch.from_numpy(G[row : row + 1]), method="index", keep=10)
        order = np.argsort(-true)
        hits[0] += (answer.scores[0, :10].numpy() >= true[order[9]] - 1e-9).sum()
        hits[1] += (answer.scores[0, -10:].numpy() <= true[order[-10]] + 1e-9).sum()
    assert hits / 10 / len(drawn) == pytest.approx((report.recall_highest, report.recall_lowest), abs=1e-9)
    assert min(report.recall_highest, report.recall_lowest) > 0.9


def every_row(store: RunStore) -> Tensor:
    rows = store.read(0, store.n_rows(), dtype=torch.float64).rows
    assert rows is not None
    return rows


def test_recall_by_hand() -> None:
    exact = torch.tensor([[9.0, 8.0, -7.0, -8.0], [5.0, 5.0, 1.0, 0.0]])
    assert _recalls(exact, exact, 2) == (1.0, 1.0)
    assert _recalls(torch.tensor([[9.0, 7.0, -7.0, -8.0], [5.0, 4.0, 2.0, 1.0]]), exact, 2) == (0.5, 0.75)
    assert _recalls(torch.tensor([[8.0, 9.0, -7.0, -6.0], [5.0, 5.0, 1.0, 1.0]]), exact, 2) == (1.0, 0.75)


def test_as_many_partitions_are_searched_as_the_recall_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.tensor([[9.0, 8.0, -7.0, -8.0]])
    tried: list[int] = []

    def found(store: Any, facts: dict[str, Any], v: Tensor, k: int) -> tuple[Tensor, None]:
        tried.append(facts["probes"])
        right = {3: 1, 6: 3, 12: 3}.get(facts["probes"], 4)  # of the four
        return torch.where(torch.arange(4) < right, exact, torch.zeros(1, 4)), None

    monkeypatch.setattr(module, "search", found)
    for wanted, probes in ((0.5, [3, 6]), (0.75, [3, 6, 12, 24]), (1.0, [3, 6, 12, 24])):
        tried.clear()
        chosen, _ = _tuned(None, {"partitions": 50}, torch.zeros(1, 2), 2, exact, wanted)  # type: ignore[arg-type]
        assert (tried, chosen["probes"]) == (probes, probes[-1])
    monkeypatch.setattr(module, "search", lambda *_: (torch.zeros(1, 4), None))
    chosen, _ = _tuned(None, {"partitions": 5}, torch.zeros(1, 2), 2, exact, 0.9)  # type: ignore[arg-type]
    assert (chosen["probes"], chosen["recall_highest"]) == (5, 0.0), "what was not reached is said"


def test_labels_are_those_of_the_rows(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run")
    every = run.query_gradients(normal(1, run.store.width, seed=1))
    rows = torch.tensor([[5, 0, 269], [100, 5, 3]])
    samples, steps = labels(run.store, rows)
    assert samples.tolist() == [[every.sample_ids[i] for i in line] for line in rows.tolist()]
    assert steps.tolist() == [[int(every.steps[i]) for i in line] for line in rows.tolist()]


def test_where_all_are_kept_nothing_is_approximate(tmp_path: Path) -> None:
    run, _ = indexed(tmp_path / "run")
    v = normal(2, run.store.width, seed=8)
    one, two = (run.query_gradients(v, method=how, keep=ROWS // 2) for how in ("index", "embeddings"))
    assert_same(one.scores, two.scores, run.store.width)
    assert one.kept is None


def test_a_run_of_one_occurrence(tmp_path: Path) -> None:
    model = mlp()
    train(tmp_path / "run", model, sgd(model), 1, size=1)
    run = backstory.open(tmp_path / "run")
    run.embed()
    assert run.build_index().recall_highest == 1.0
    assert run.query_gradients(normal(1, run.store.width, seed=1), method="index", keep=1).scores.shape == (1, 1)


class Words(nn.Module):
    """A head over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(7, 5), nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S) -> (B, S, 7)."""
        logits: Tensor = self.head(self.token(x).tanh())
        return logits


def test_runs_whose_gradient_is_a_sum_of_rows(tmp_path: Path) -> None:
    """No gradient row is kept there: the queries that measure the recall are sums of curvature rows."""
    model = seeded(Words())
    x = torch.randint(0, 7, (40, 5), generator=torch.Generator().manual_seed(0))
    optimizer = sgd(model, 0.01)
    with backstory.record(
        model, optimizer, tmp_path / "run", loss_reduction="token-mean", **{**FULL, "curvature": "empirical/2"}
    ) as rec:
        for t in range(10):
            optimizer.zero_grad()
            ids = list(range(4 * t, 4 * t + 4))
            with rec.step(ids, tokens=[4] * 4):
                nn.functional.cross_entropy(model(x[ids, :-1]).flatten(0, 1), x[ids, 1:].flatten()).backward()
                optimizer.step()
    run = backstory.open(tmp_path / "run")
    run.embed()
    assert run.build_index(queries=6).recall_highest > 0.8
    assert run.query_gradients(normal(1, run.store.width, seed=1), method="index", keep=3).method == "index"


# -- what is refused ---------------------------------------------------------------------------------------------------


def test_questions_that_no_index_answers(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run")
    v = normal(1, run.store.width, seed=8)
    with pytest.raises(UsageError, match=r"no embeddings for step 30 to index: call run\.embed\('final'\) first"):
        run.build_index()
    with pytest.raises(UsageError, match=r"no embeddings for step 30 with per_layer=False.*then run\.build_index"):
        run.query_gradients(v, method="index", keep=3)
    run.embed()
    with pytest.raises(UsageError, match=r"no index of the embeddings.*call run\.build_index\(30\) first"):
        run.query_gradients(v, method="index", keep=3)
    run.build_index(queries=2)
    with pytest.raises(UsageError, match="pass keep=k"):
        run.query_gradients(v, method="index")
    with pytest.raises(UsageError, match=r"per_layer=True.*then run\.build_index"):
        run.query_gradients(v, method="index", keep=3, per_layer=True)
    with pytest.raises(UsageError, match=r"contraction=0\.0.*then run\.build_index"):
        run.query_gradients(v, method="index", keep=3, contraction="never")
    for wrong in ({"recall": 0.0}, {"recall": 1.1}, {"queries": 0}):
        with pytest.raises(UsageError, match="expected a share above 0 and at most 1, and at least 1 query"):
            run.build_index(**wrong)
    assert run.query_gradients(v, method="index", keep=3).method == "index", (
        "a refused build leaves the index that was there"
    )


def test_segments_have_no_index(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run")
    run.embed(segments=2)
    with pytest.raises(UsageError, match=r"first, without segments"):
        run.build_index()
    with pytest.raises(UsageError, match=r"then run\.build_index"):
        run.query_gradients(normal(1, run.store.width, seed=8), method="index", keep=3)


def test_after_embedding_again_the_index_is_refused_by_readers_too(tmp_path: Path) -> None:
    run, _ = indexed(tmp_path / "run")
    v, other = normal(1, run.store.width, seed=8), backstory.open(tmp_path / "run")
    assert other.query_gradients(v, method="index", keep=3).method == "index"
    run.embed(encoding="float64", dtype=torch.float64)  # the same numbers, in other files
    for reader in (run, other, backstory.open(tmp_path / "run")):
        with pytest.raises(UsageError, match="embedding again makes an older one useless"):
            reader.query_gradients(v, method="index", keep=3)
    run.build_index(queries=2)
    assert other.query_gradients(v, method="index", keep=3).method == "index"


def test_after_going_on_from_an_earlier_step_there_is_no_index(tmp_path: Path) -> None:
    run, _ = indexed(tmp_path / "run")
    with RunStore.open(tmp_path / "run", write=True) as store:
        store.truncate(STEPS - 1)
    assert run.store.index(STEPS) is None
    assert not list((tmp_path / "run").glob("idx-*"))


def test_many_queries_at_once_are_as_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = indexed(tmp_path / "run")
    v = normal(5, run.store.width, seed=8)
    together = run.query_gradients(v, method="index", keep=3)
    monkeypatch.setattr(module, "BYTES", 1)
    assert_close(run.query_gradients(v, method="index", keep=3).scores, together.scores, 1e-12)
    for q in range(5):
        alone = run.query_gradients(v[q : q + 1], method="index", keep=3)
        assert alone.sample_ids.tolist() == [together.sample_ids[q].tolist()]
        assert_close(alone.scores, together.scores[q : q + 1], 1e-12)


def test_where_the_searched_partitions_have_too_few_all_are_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = indexed(tmp_path / "run")
    nearest, probed = RunStore.nearest, []

    def few(self: RunStore, facts: Any, q: Tensor, k: int, probes: int) -> list[int]:
        probed.append(probes)
        found = nearest(self, facts, q, k, probes)
        return found[:2] if len(probed) <= 2 else found

    monkeypatch.setattr(RunStore, "nearest", few)
    assert run.query_gradients(normal(1, run.store.width, seed=8), method="index", keep=4).scores.shape == (1, 8)
    assert len(probed) == 4
    monkeypatch.setattr(RunStore, "nearest", lambda *_: [1, 2])
    with pytest.raises(StoreError, match=r"names 2 occurrences, expected at least 8\. Build it again"):
        run.query_gradients(normal(1, run.store.width, seed=8), method="index", keep=4)
