"""Exact unrolling, against central differences of whole runs with torch's own optimizer."""

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.support import examples
from tests.support.oracles import assert_close, assert_same
from torch import Tensor, nn

from backstory import Recipe
from backstory.errors import NumericalError, UnsupportedError, UsageError
from backstory.exact.derivative import State, Update
from backstory.exact.leave_out import leave_out
from backstory.exact.reverse import Sweep, boundaries, reverse
from backstory.replay.tape import Removal

module = importlib.import_module("backstory.exact.reverse")  # the package has a function of its name
CAUSES = "A ratio of 4 would mean a missing weight, −1 a wrong sign; a median of 1 with large errors a missing path (m, v, c)."
CLIP = 0.15


def assert_scores(actual: Tensor, expected: Tensor) -> None:
    """Two sweeps over two replays: the sums of training, and twice as many of its Hessian products."""
    assert_same(actual, expected, 3 * examples.TERMS, size=1.0)


@pytest.mark.parametrize("clip", [None, CLIP])
@pytest.mark.parametrize("kind", examples.KINDS)
def test_equals_differences_of_the_replay(kind: str, clip: float | None) -> None:
    fresh = partial(examples.make, kind, clip, schedule=True)
    actual = reverse(fresh, "q")
    assert_close(actual.scores, examples.differences(fresh), rtol=1e-6, causes=CAUSES)
    assert actual.method == "exact unrolling"


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_clipping_is_at_work(kind: str) -> None:
    free, held = (reverse(partial(examples.make, kind, clip), "q").scores for clip in (None, CLIP))
    assert float((free - held).norm()) > 0.02 * float(free.norm()), "the clipped cases above would say nothing"


def test_dropout_and_sums_are_followed() -> None:
    fresh = partial(examples.make, "momentum", dropout=0.4, reduction="sum")
    assert_close(reverse(fresh, "q").scores, examples.differences(fresh), rtol=1e-6, causes=CAUSES)


class Tiny(nn.Module):
    """One causal attention between tied embeddings: fused attention has no second derivative of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.norm, self.qkv = nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 18)
        self.outputs = nn.Linear(6, 7, bias=False)
        self.outputs.weight = self.inputs.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.inputs(x)
        q, k, v = self.qkv(self.norm(h)).chunk(3, -1)
        out: Tensor = self.outputs(h + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return out


def language() -> Recipe:
    torch.manual_seed(0)
    model, x = Tiny().double(), torch.randint(0, 7, (18, 6))

    def loss(m: nn.Module, z: Tensor) -> Tensor:
        return nn.functional.cross_entropy(m(z[:, :-1]).transpose(1, 2), z[:, 1:], reduction="none").mean(1)

    return Recipe(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss=loss,
        batches=[(list(range(i, i + 4)), x[i : i + 4]) for i in range(0, 16, 4)],
        clip_norm=0.5,
        queries={"q": x[16:]},
    )


@pytest.mark.parametrize("vectorised", [True, False])
def test_attention_and_tied_weights_are_followed(vectorised: bool) -> None:
    h, answer = 1e-6, reverse(language, "q")
    up, down = (
        leave_out(language, [Removal((s,), share=k * h) for s in range(16)], "q", vectorised=vectorised)
        for k in (1, -1)
    )
    predicted = torch.stack([answer.sum_over([s]) for s in range(16)])
    assert_close(predicted, (up - down) / (2 * h), rtol=1e-5, causes=CAUSES)


@pytest.mark.parametrize(
    ("kind", "clip", "change"),
    [
        ("sgd", CLIP, lambda step: step._replace(slope=0.0)),
        (
            "decay",
            None,
            lambda step: step._replace(spans=tuple(s._replace(by=s.by._replace(l2=0.0)) for s in step.spans)),
        ),
        (
            "momentum",
            None,
            lambda step: step._replace(spans=tuple(s._replace(by=s.by._replace(mu=0.0)) for s in step.spans)),
        ),
        ("adam", None, lambda step: step._replace(k=torch.zeros_like(step.k))),
        ("adamw", CLIP, lambda step: step._replace(slope=0.0)),
    ],
)
def test_the_comparison_sees_each_missing_path(
    kind: str, clip: float | None, change: Callable[[Update], Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = partial(examples.make, kind, clip, schedule=True)
    expected, original = examples.differences(fresh), module.take
    monkeypatch.setattr(module, "take", lambda *args: change(original(*args)))
    with pytest.raises(AssertionError, match="relative error"):
        assert_close(reverse(fresh, "q").scores, expected, rtol=1e-4)


def test_an_update_that_torch_did_not_take_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = module.spans_of
    monkeypatch.setattr(
        module, "spans_of", lambda sizes, steps: original(sizes, [c._replace(rate=0.1) for c in steps])
    )  # fmt: skip
    with pytest.raises(NumericalError, match="differs from the step that the optimizer took"):
        reverse(examples.make, "q")


@pytest.mark.parametrize("segments", [2, 5, 8])
def test_the_number_of_segments_does_not_matter(segments: int) -> None:
    fresh = partial(examples.make, "adam", CLIP, dropout=0.2)
    assert_scores(reverse(fresh, "q", segments=segments).scores, reverse(fresh, "q").scores)


@pytest.mark.parametrize("segments", [None, 2])
def test_a_sweep_may_stop_early(segments: int | None) -> None:
    fresh = partial(examples.make, "adam", CLIP, dropout=0.2)
    actual, every = reverse(fresh, "q", since=5, segments=segments), reverse(fresh, "q")
    assert_scores(actual.scores, every.between(5, 8).scores)
    assert actual.steps.tolist() == every.between(5, 8).steps.tolist()
    assert actual.sample_ids.tolist() == every.between(5, 8).sample_ids.tolist()
    with pytest.raises(UsageError, match="between 0 and 7"):
        reverse(fresh, "q", since=8)


def test_queries_together_equal_queries_alone() -> None:
    fresh = partial(examples.make, "adamw", CLIP)
    together = reverse(fresh, "q").scores
    for k in range(3):
        alone = reverse(fresh, lambda m, k=k: examples.make().loss(m, examples.make().queries["q"])[k])  # type: ignore[misc]
        assert_scores(alone.scores[0], together[k])


def test_small_removals_agree_and_large_ones_nearly() -> None:
    fresh = partial(examples.make, "momentum")
    answer = reverse(fresh, "q")
    removals = [Removal((s,), share=1e-5) for s in range(12)]
    predicted = torch.stack([answer.sum_over(r.samples) for r in removals])
    torch.testing.assert_close(leave_out(fresh, removals, "q") / 1e-5, predicted, rtol=1e-3, atol=1e-5)
    whole = leave_out(fresh, [Removal((s,)) for s in range(12)], "q")
    assert float((whole.sign() == predicted.sign()).double().mean()) > 0.8, "the sign: positive is helpful"


def test_the_model_of_an_earlier_step_can_be_asked() -> None:
    def short() -> Recipe:
        recipe = examples.make("adam")
        return replace(recipe, batches=recipe.batches[:5])

    actual = reverse(partial(examples.make, "adam"), "q", at=5)
    assert_scores(actual.scores, reverse(short, "q").scores)
    assert actual.at == 5


def test_a_killed_sweep_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = examples.whole  # a sweep is found by the bits of the run's weights: they must repeat
    expected, original = reverse(fresh, "q").scores, Sweep._step_back
    steps: list[int] = []
    limit = 4

    def back(sweep: Sweep, t: int, x: State) -> object:
        if len(steps) == limit:
            raise KeyboardInterrupt
        steps.append(t)
        return original(sweep, t, x)

    monkeypatch.setattr(Sweep, "_step_back", back)
    with pytest.raises(KeyboardInterrupt):
        reverse(fresh, "q", cache=tmp_path)
    first = steps.copy()
    steps.clear()
    limit = 100
    assert torch.equal(reverse(fresh, "q", cache=tmp_path).scores, expected)
    assert first[0] == 7
    assert 0 < len(steps) < 8
    steps.clear()
    assert torch.equal(reverse(fresh, "q", cache=tmp_path).scores, expected)
    assert not steps


def test_running_statistics_are_mentioned() -> None:
    def normed() -> Recipe:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
        return replace(examples.make(), model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    assert any("running statistics" in note for note in reverse(normed, "q").caveats)
    assert not reverse(examples.make, "q").caveats


def test_an_optimizer_that_is_not_modelled_is_refused() -> None:
    def amsgrad() -> Recipe:
        recipe = examples.make()
        return replace(recipe, optimizer=torch.optim.AdamW(recipe.model.parameters(), amsgrad=True))

    with pytest.raises(UnsupportedError, match="AMSGrad"):
        reverse(amsgrad, "q")


def test_progress_is_told() -> None:
    seen: list[tuple[int, int]] = []
    reverse(examples.make, "q", progress=lambda a, b: seen.append((a, b)))
    assert seen == [(k, 8) for k in range(1, 9)]


@pytest.mark.parametrize("since", [0, 3])
def test_segments_are_as_few_as_the_disk_allows(since: int) -> None:
    for steps in range(1, 40):
        assert boundaries(since, since + steps, None, steps + 1) == [since]
        for most in range(2, steps + 2):
            bounds = boundaries(since, since + steps, None, most)
            longest = max(b - a for a, b in pairwise([*bounds, since + steps]))
            assert bounds[0] == since
            assert len(bounds) + longest <= most or len(bounds) ** 2 >= steps
    assert boundaries(0, 9, 3, 2) == [0, 3, 6]


def test_no_segments_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        boundaries(0, 5, 0, 9)
