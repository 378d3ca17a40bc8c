"""Shapes filled by hand, with hostile text in every place that a user can fill: what pages are made of, without a run."""

import base64
import math
from typing import Any

from backstory.demo.digits import png
from backstory.web import schemas as shapes

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
PLACE: dict[str, Any] = {
    "run": "runs/exam<b>ple",
    "path": "/",
    "params": {},
    "query_sets": [{"name": "law", "count": 3}, {"name": "poems", "count": 2}],
    "checkpoints": [40, 80, 120],
    "can_type": True,
    "can_upload": True,
    "can_shade": True,
}


def picture() -> str:
    import torch

    return "data:image/png;base64," + base64.b64encode(png(torch.rand(8, 8))).decode()


def sample(k: int, **more: Any) -> shapes.Sample:
    text = f"The court held that sample {k}\nkeeps its line breaks. {HOSTILE}"
    known = {"text": text, "label": f"label {k % 3}", "source": ("law", "poems")[k % 2], "value": 0.01 * (k - 2)}
    return shapes.Sample(**{"id": f"law/{k}", "path": f"/samples/law%2F{k}", "steps": [k, k + 40], **known, **more})


def hit(k: int, influence: float, **more: Any) -> shapes.Hit:
    words = shapes.HELPED if influence > 0 else shapes.HURT
    known = {"sample": sample(k), "step": 40 + k, "influence": influence, "words": words, "occurrences": 2}
    return shapes.Hit(**{**known, "common": ["court", "held"], **more})


def phases(present: bool = True) -> shapes.Phases:
    side: dict[str, Any] = {"present": present, "p": 0.002, "level": 1.0}
    windows = [shapes.Window(name="early", first=0, last=20, level=3.2, times_basin=4.0)] if present else []
    three = "Three phases: warm-up until step 20, basin until step 90, then ascent."
    return shapes.Phases(
        present=present, shape="three phases" if present else "falls", basin=0.8, windows=windows, steps=120,
        words=three if present else "Influence falls during training.",
        warm_up=shapes.Side(**side, boundary=20 if present else None),
        ascent=shapes.Side(**side, boundary=90 if present else None),
    )  # fmt: skip


def timeline(**more: Any) -> shapes.Timeline:
    curve = [3 * math.exp(-t / 9) + 0.6 + 0.3 * math.sin(1.7 * t) + (0.03 * max(0, t - 90)) for t in range(120)]
    gaps = [None if t % 10 == 3 else x for t, x in enumerate(curve)]
    known = {"queries": "law", "at": 120, "influence": curve, "rate": [0.02] * 120, "per_rate": gaps, "size": curve}
    loss = [2.3 * math.exp(-t / 30) + 0.2 for t in range(120)]
    return shapes.Timeline(
        **{**known, "loss": loss, "phases": phases(), "notes": ["the mean over 3 queries"], "unit": "loss", **more}
    )


def trust() -> shapes.Trust:
    return shapes.Trust(words=["SGD's steps are modelled exactly.", f"A weakness {HOSTILE}"])


def overview(**more: Any) -> shapes.Overview:
    known: dict[str, Any] = {
        "name": "example", "created": "2025-11-16T09:30:00+00:00", "model": "Sequential, 12,345 parameters", "optimizer": "AdamW", "steps": 120,
        "occurrences": 1920, "samples": 960, "dims": 486, "curvature": "exact:10", "projection": "learned", "recipe": "a.b:c",
        "checkpoints": [40, 80, 120], "query_sets": PLACE["query_sets"], "default_queries": "law", "can_type": True,
        "can_upload": True, "can_shade": True, "has": shapes.Has(text=True, image=False, source=True, label=True),
        "loss": timeline().loss, "quality": trust(), "notes": ["a note"], "missing": ["an image: the recipe has no page.image"],
        "timeline": timeline(),
    }  # fmt: skip
    return shapes.Overview(**{**known, **more})


def samples(**more: Any) -> shapes.Samples:
    items = [sample(k, value=None if k == 3 else 0.01 * (k - 2)) for k in range(5)]
    known = {"total": 123, "page": 2, "per": 5, "sort": "value", "queries": "law", "items": items}
    return shapes.Samples(**{**known, "sources": ["law", "poems", HOSTILE], "labels": ["label 0", "label 1"], **more})


def life(**more: Any) -> shapes.Life:
    known: dict[str, Any] = {
        "sample": sample(1), "queries": "law", "at": 120,
        "occurrences": [shapes.Occurrence(step=s, influence=x, norm=1.5) for s, x in ((1, 0.02), (41, -0.005), (81, 0.01))],
        "evolution": [shapes.AtCheckpoint(at=a, influence=x) for a, x in ((40, 0.04), (80, 0.02), (120, 0.015))],
        "helped": [shapes.OnQuery(query=f"law 0 {HOSTILE}", index=0, path="/queries/law/0", influence=0.02)],
        "hurt": [shapes.OnQuery(query="poems 1", index=1, path="/queries/poems/1", influence=-0.001)],
        "erased_by": None, "lost": None, "saturation": None,
        "neighbours": [shapes.Neighbour(sample=sample(k), similarity=0.9 - 0.2 * k) for k in range(6)],
        "notes": ["a note"], "unit": "units of the queries' mean loss",
    }  # fmt: skip
    return shapes.Life(**{**known, **more})


def saturated() -> shapes.Life:
    terms = shapes.Saturation(just_after=0.05, momentum=0.01, erased=0.03, decay=0.005, left=0.025)
    erasers = [shapes.Eraser(sample=sample(k), step=60 + k, erased=0.01 / (k + 1)) for k in range(4)]
    return life(saturation=terms, erased_by=erasers, lost=0.025)


def sources(**more: Any) -> shapes.Sources:
    names = ("law", "poems", HOSTILE)
    values = [
        shapes.SourceValue(name=n, samples=320, value=0.4 - 0.3 * k, low=0.2 - 0.3 * k, high=0.7 - 0.3 * k, path=f"/samples?source={k}")
        for k, n in enumerate(names)
    ]  # fmt: skip
    matrix = [[0.5, -0.1], [0.05, 0.3], [-0.2, -0.02]]
    known = {"by": "source", "at": 120, "sources": values, "domains": ["law", "poems"], "matrix": matrix}
    return shapes.Sources(**{**known, "interval": "95 %", "notes": [], "unit": "summed influence", **more})


def harmful(**more: Any) -> shapes.Harmful:
    items = [hit(k, -0.02 / (k + 1)) for k in range(4)]
    return shapes.Harmful(**{"queries": "law", "at": 120, "items": items, "notes": [], "unit": "nats", **more})


def answer(**more: Any) -> shapes.Answer:
    query = shapes.Query(
        kind="stored", set="law", index=0, text=f"The court held.\nA second line. {HOSTILE}", label="law 0"
    )
    steps = list(range(120))
    pace = shapes.Pace(steps=steps, influence=[math.sin(t / 9) / 50 for t in steps], size=[0.01] * 120)
    known: dict[str, Any] = {
        "query": query, "at": 120, "checkpoints": [40, 80, 120], "helpful": [hit(k, 0.05 / (k + 1)) for k in range(3)],
        "harmful": [hit(k + 3, -0.03 / (k + 1)) for k in range(3)], "timeline": pace, "replay": None, "method": "segments",
        "quality": trust(), "notes": ["a note"], "unit": "nats of the query's loss", "seconds": 0.123,
    }  # fmt: skip
    return shapes.Answer(**{**known, **more})


def replayed() -> shapes.Answer:
    ids = [f"law/{k}" for k in range(6)]
    rankings = [shapes.Ranking(at=a, helpful=ids[k:3] + ids[:k], harmful=ids[3:]) for k, a in enumerate((40, 80, 120))]
    return answer(replay=rankings)


def ask(**more: Any) -> shapes.AskForm:
    stored = [
        shapes.Stored(index=k, label=f"law {k}", text=f"A text {HOSTILE}", path=f"/queries/law/{k}") for k in range(2)
    ]
    shown = [shapes.Stored(index=0, label="a seven", image=picture(), path="/queries/poems/0")]
    sets = [
        shapes.StoredSet(name="law", count=3, items=stored),
        shapes.StoredSet(name="poems", count=1, items=shown),
    ]
    known = {"query_sets": sets, "checkpoints": [40, 80, 120], "can_type": True, "can_upload": True}
    return shapes.AskForm(**{**known, "longest_text": 20_000, "dims": 486, "missing": [], **more})


def shading() -> shapes.Shading:
    pieces = [shapes.Piece(text=t, influence=x) for t, x in (("The ", 0.01), ("<script>", -0.02), (" court", 0.0))]
    return shapes.Shading(items=[shapes.Tokens(sample="law/0", step=40, tokens=pieces, total=-0.01)], notes=[])


def failure() -> shapes.Failure:
    return shapes.Failure(error=shapes.Problem(code=404, message=f"there is no {HOSTILE}", hint="name another."))


PAGES: dict[str, Any] = {
    "overview": overview,
    "timeline": timeline,
    "phases": phases,
    "samples": samples,
    "sample": life,
    "sample saturated": saturated,
    "sources": sources,
    "harmful": harmful,
    "ask": ask,
    "answer": answer,
    "answer replayed": replayed,
    "compare": lambda: shapes.Comparison(left=answer(), right=replayed(), both=["law/0"]),
    "tokens": shading,
    "health": lambda: shapes.Health(ok=True, busy=1, limit=8),
    "error": failure,
}
