"""Where the batch is: by values, not by shapes alone."""

import pytest
import torch
from torch import Tensor, nn

from backstory.capture.nested import nested
from backstory.capture.places import Scattered, find_places, place_of

B, S = 3, 4


def more(x: Tensor, dim: int = 0) -> Tensor:
    """With one more sample, like the first."""
    return torch.cat([x, x.narrow(dim, 0, 1)], dim)


X = torch.randn(B, S, 2, generator=torch.Generator().manual_seed(0))
ALL = more(X)
CASES = {
    "first": (X, ALL, 0),
    "second": (X.transpose(0, 1), ALL.transpose(0, 1), 1),
    "flattened": (X.flatten(0, 1), ALL.flatten(0, 1), 0),
    "flattened the other way": (X.transpose(0, 1).flatten(0, 1), ALL.transpose(0, 1).flatten(0, 1), Scattered),
    "shared": (torch.arange(S), torch.arange(S), None),
    "a mean over the batch": (X.mean(0), ALL.mean(0), Scattered),
    "less the mean": (X - X.mean(0), ALL - ALL.mean(0), Scattered),
    "in another order": (X, ALL.roll(1, 0), Scattered),
    "some rows": (X.flatten(0, 1)[:5], ALL.flatten(0, 1)[:7], Scattered),
    "every with every": (X[:, 0] @ X[:, 0].T, ALL[:, 0] @ ALL[:, 0].T, Scattered),
    "one fewer dimension": (X, ALL[0], Scattered),
    "a mask with infinities": (X.sign() * torch.inf, ALL.sign() * torch.inf, 0),
    "nothing": (torch.zeros(0, 2), torch.zeros(0, 2), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_place_of_a_tensor(name: str) -> None:
    before, after, expected = CASES[name]
    assert place_of(before, after, B) == expected


class Model(nn.Module):
    """Attention, dropout, running statistics and a table; the sequence first inside if it is told so."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=first)
        self.norm, self.table, self.first = nn.BatchNorm1d(4), nn.Embedding(9, 4), first

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.table(torch.arange(x.shape[1 if self.first else 0]))[:, None].transpose(0, 1 if self.first else 0)
        h = self.attention(h, h, h)[0]
        out: Tensor = self.norm(h.mean(1 if self.first else 0))
        return out


@pytest.mark.parametrize("first", [True, False])
def test_as_many_steps_as_samples(first: bool) -> None:
    torch.manual_seed(0)
    model = Model(first)
    x, state = torch.randn(5, 5, 4), torch.get_rng_state()
    before = {n: b.clone() for n, b in model.named_buffers()}
    found = find_places(model, nested(((x,), {})), 5, [model.attention, model.table], None)
    assert found is not None
    (places,) = found[model.attention]
    assert set(places.inputs) == {0 if first else 1}
    assert found[model.table][0].inputs == (None,)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert not any(m._forward_hooks for m in model.modules())


class Routed(nn.Module):
    """Tokens go to one of two maps by their first feature."""

    def __init__(self) -> None:
        super().__init__()
        self.maps, self.both = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.both(x.flatten(0, 1))
        out = torch.zeros_like(flat)
        for k, one in enumerate(self.maps):
            (rows,) = torch.where((x.flatten(0, 1)[:, 0] > 0) == bool(k))
            out = out.index_add(0, rows, one(flat[rows]))
        return out.view_as(x)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("features", [[1.0, -1.0, 2.0, -2.0], [1.0, -1.0]])
def test_as_many_tokens_of_each_sample_by_chance(features: list[float], size: int) -> None:
    """Two of each sample's four tokens go to either map, or one of two."""
    torch.manual_seed(0)
    model, x = Routed(), torch.randn(size, len(features), 2)
    x[..., 0] = torch.tensor(features)
    found = find_places(model, nested(((x,), {})), size, [model.both, *model.maps], None)
    assert found is not None
    assert found[model.both][0].inputs == (0,), "it is given all of them"
    assert [found[m][0].inputs for m in model.maps] == [(Scattered,), (Scattered,)]


class Picky(Routed):
    """It refuses positions that are all alike."""

    def forward(self, x: Tensor) -> Tensor:
        if bool((x == x[:, :1]).all()):
            raise ValueError("two different tokens are needed")
        return super().forward(x)


def test_tokens_that_may_be_gathered_count_as_gathered_where_no_other_call_can_tell() -> None:
    torch.manual_seed(0)
    model, x = Picky(), torch.randn(3, 4, 2)
    x[..., 0] = torch.tensor([1.0, -1.0, 2.0, -2.0])
    found = find_places(model, nested(((x,), {})), 3, [*model.maps], None)
    assert found is not None
    assert [found[m][0].inputs for m in model.maps] == [(Scattered,), (Scattered,)]


def test_what_cannot_be_told() -> None:
    rows = nn.Linear(4, 2)
    x = nested(((torch.randn(5, 5, 4),), {}))
    assert find_places(rows, x, 5, [], None) is None, "a map of each row is the same both ways"
    told = find_places(rows, x, 5, [rows], 1)
    assert told is not None
    assert told[rows][0].inputs == (1,)

    class Fixed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.view(5, 5, 4))

    assert find_places(Fixed(4, 2), x, 5, [], None) is None, "it takes no other batch"
