"""What the text demo's run begins from: shared out evenly, pretrained, written once, and checked when it is read."""

import pytest
import torch
from tests.demo.test_texts import LETTERS, TINY, without_network
from tests.support.oracles import assert_same

from backstory.demo import pretrained
from backstory.demo.data import DataError, Document
from backstory.demo.gpt_model import GPT, loss
from backstory.demo.pretrained import QUERIES, TextSetup, empty_model, load_beginning, make_beginning, read_documents
from backstory.demo.stages import Stages
from backstory.demo.texts import recipe
from backstory.errors import UsageError

SETUP = TextSetup(**TINY)
text = pytest.fixture(autouse=True)(without_network)


def test_no_passage_is_used_twice_and_every_domain_has_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(pretrained, "pretrain", lambda setup, model, tokens, progress: seen.append(tokens))
    made = make_beginning(TextSetup(**TINY, seed=7), Stages(None))
    every = torch.cat([made.passages, made.queries.flatten(0, 1), seen[0]])
    assert [len(made.passages), tuple(made.queries.shape), len(seen[0])] == [32, (3, QUERIES, 13), 12]
    assert len(every.unique(dim=0)) == len(every)
    counts = [sum(name.startswith(f"{domain}/") for name in made.ids) for domain in made.domains]
    assert counts == [11, 11, 10]
    firsts = [name.split("/")[0] for name in made.ids[:16]]
    assert len(set(firsts)) == 3, "training must mix the domains"


def test_law_is_court_opinions_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def corpus(names: list[str], limit: int) -> list[Document]:
        return [Document(f"{name}-{k}", name, f"{name} {k}") for name in names for k in range(4)]

    monkeypatch.setattr(pretrained, "corpus", corpus)
    documents = read_documents(SETUP, lambda done, total: None)
    law = [d.id for d in documents if d.source == "law"]
    assert sorted(law) == sorted([f"law-{k}" for k in range(4)] + [f"court-opinions-{k}" for k in range(4)])
    assert {d.source for d in documents} == set(LETTERS)


def test_pretraining_happens_once_and_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = TextSetup(**{**TINY, "pretraining": 12, "seed": 3})
    stages = Stages(None)
    made = make_beginning(longer, stages)
    assert list(stages.seconds) == ["read text", "pretrain"]
    monkeypatch.setattr(pretrained, "corpus", None)
    again, later = Stages(None), make_beginning(longer, stages)
    assert (later.sha256, again.seconds) == (made.sha256, {})
    tokens = made.queries.flatten(0, 1)
    with torch.no_grad():
        before, after = (loss(m, tokens).mean() for m in (empty_model(longer, made.tokenizer), made.model(longer)))
    assert after < before


def test_the_same_settings_make_the_same_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "pretrain", lambda *_: None)
    setup, seen = TextSetup(**TINY, seed=11), set()
    for _ in range(4):
        seen.add(make_beginning(setup, Stages(None)).sha256)
        setup.file.unlink()
    assert len(seen) == 1


def test_a_recipe_reads_what_its_run_began_from(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_beginning(SETUP, Stages(None))
    monkeypatch.setattr(pretrained, "corpus", None)
    monkeypatch.setattr(pretrained, "pretrain", None)
    plan = recipe(sha256=made.sha256, **TINY)
    assert [i for ids, _ in plan.batches for i in ids] == made.ids
    for name, x in plan.model.state_dict().items():
        assert torch.equal(x, made.weights[name])


def test_another_beginning_is_refused(tmp_path: object) -> None:
    made = make_beginning(SETUP, Stages(None))
    with pytest.raises(DataError, match=r"is not the expected file.*The run was made from another one"):
        load_beginning(SETUP, "0" * 64)
    with pytest.raises(DataError, match=r"does not exist\. Run `backstory demo text` again"):
        load_beginning(TextSetup(**TINY, seed=99), made.sha256)


def test_the_same_settings_give_the_same_numbers() -> None:
    made = make_beginning(SETUP, Stages(None))
    SETUP.file.unlink()
    again = make_beginning(SETUP, Stages(None))
    assert (again.ids, again.tokenizer) == (made.ids, made.tokenizer)
    for name, x in again.weights.items():
        assert_same(x, made.weights[name], 3 * (16 + 64 + 258 + 4 * 12))


def test_broken_encodings_are_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        pretrained, "corpus", lambda names, limit: [Document("0", names[0], "LIZENZ FÃ\x9cHRT \x96 naïve")]
    )
    assert {d.text for d in read_documents(SETUP, lambda done, total: None)} == {"LIZENZ FÜHRT – naïve"}


def test_progress_counts_sources_and_steps() -> None:
    seen: list[tuple[str, int, int]] = []
    make_beginning(TextSetup(**TINY, seed=11), Stages(lambda *one: seen.append(one)))
    assert seen[: len(LETTERS)] == [("read text", n + 1, 3) for n in range(3)]
    assert seen[len(LETTERS) :] == [("pretrain", n + 1, 3) for n in range(3)]


def test_a_corpus_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match="code has 57 passages, and this run needs 154"):
        make_beginning(TextSetup(**{**TINY, "steps": 100}), Stages(None))


def test_the_model_has_as_many_outputs_as_there_are_tokens() -> None:
    made = make_beginning(SETUP, Stages(None))
    assert isinstance(made.model(SETUP), GPT)
    assert made.model(SETUP).head.out_features == made.tokenizer.size
