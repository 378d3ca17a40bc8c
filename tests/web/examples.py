"""Views of results filled by hand, with hostile text in every place that a user can fill: what pages are made of, without a run."""

import base64
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from backstory import insight
from backstory.demo.digits import png
from backstory.insight.neighbours import Neighbour, QueryInfluence
from backstory.insight.phases import Phases, Side, Window
from backstory.insight.sources import ALL, Value
from backstory.results import figures
from backstory.results.comparison import Ranking, Rankings, compare
from backstory.results.influence import Hit, Influence, Occurrences
from backstory.results.quality import Agreement, FirstOrder, Quality
from backstory.results.recording_report import RecordingReport
from backstory.results.row import plain
from backstory.web.views import View, sample_path

HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)>'
RANKED = (-0.05, 0.31, 0.52, 0.64, 0.71, 0.78, None, 0.83, 0.9, 0.97)  # of tenths of 120 steps
RECORDING = RecordingReport(
    steps=120, optimizer=f"Adam {HOSTILE}", curvature="empirical", projection="learned", retained=0.9
)


def quality(ranks: Sequence[float | None] = RANKED, **more: Any) -> Quality:
    """As it was measured: the first fifth is not ranked."""

    def agreement(first: int, last: int, rank: float | None) -> Agreement:
        low, high = (None, None) if rank is None else (rank - 0.1, rank + 0.1)
        return Agreement(first, last, rank, low, high, 16 * (last - first))

    tenths = tuple(agreement(12 * k, 12 * k + 12, rank) for k, rank in enumerate(ranks))
    thirds = tuple(agreement(40 * k, 40 * k + 40, rank) for k, rank in enumerate((0.3, 0.7, 0.9)))
    factors = tuple(2 - 0.05 * k for k in range(20))
    known = {"whole": agreement(0, 120, 0.62), "thirds": thirds, "tenths": tenths, "factors": factors}
    return Quality(**{"on": f"the mean of `law {HOSTILE}`", **known, **more})


QUALITY = quality()
UNMEASURED = Quality(command=f"backstory calibrate RUN --queries {HOSTILE}", seconds=5400.0)
EXACT = Quality(exact=True, on="the mean of `law`", first_order=FirstOrder(0.96, 0.9, 0.98, 24, 20))
ABOUT: dict[str, Any] = {"at": 120, "caveats": ("a caveat",), "quality": QUALITY, "recording": RECORDING}
CHECKPOINTS = [40, 80, 120]
PLACE: dict[str, Any] = {
    "run": "runs/exam<b>ple",
    "path": "/",
    "params": {},
    "query_sets": [{"name": "law", "count": 3}, {"name": "poems", "count": 2}],
    "checkpoints": CHECKPOINTS,
    "has": {"text": True, "image": False, "source": True, "label": True},
    "can_type": True,
    "can_upload": True,
    "can_shade": True,
}
IDS = [f"law/{k}" for k in range(8)]


def picture() -> str:
    return "data:image/png;base64," + base64.b64encode(png(torch.rand(8, 8))).decode()


def sample(k: int, **more: Any) -> dict[str, Any]:
    text = f"The court held that sample {k}\nkeeps its line breaks. {HOSTILE}"
    known = {"text": text, "label": f"label {k % 3}", "source": ("law", "poems")[k % 2], "image": None}
    return {"id": f"law/{k}", "path": sample_path(f"law/{k}"), "steps": [k, k + 40], **known, **more}


def samples_by_id() -> dict[str, Any]:
    return {f"law/{k}": sample(k) for k in range(8)}


def phases(present: bool = True) -> Phases:
    side = Side(present, 0.002, 1.0 if present else None, 20 if present else None)
    windows = (Window("early", 0, 20, 3.2, 4.0),) if present else ()
    shape = "three phases" if present else "falls"
    return Phases(present, shape, side, replace(side, boundary=90 if present else None), 0.8, windows, 120)


def timeline(present: bool = True, **more: Any) -> View:
    curve = np.array([3 * math.exp(-t / 9) + 0.6 + 0.3 * math.sin(1.7 * t) + 0.03 * max(0, t - 90) for t in range(120)])
    gaps = np.where(np.arange(120) % 10 == 3, np.nan, curve)
    loss = np.array([2.3 * math.exp(-t / 30) + 0.2 for t in range(120)])
    curves = (curve, np.full(120, 0.02), gaps, curve, loss)
    result = insight.Timeline(*curves, phases(present), **{**ABOUT, "caveats": ("the mean over 3 queries",)})
    return View({**result.as_dict(), "queries": "law", **more}, result.drawings())


def overview(**more: Any) -> View:
    when = more.pop("when", None) or timeline()
    told = {k: v for k, v in when.data.items() if k != "queries"}
    known: dict[str, Any] = {
        "name": "example", "created": "2025-11-16T09:30:00+00:00", "model": "Sequential, 12,345 parameters", "optimizer": "AdamW", "steps": 120,
        "occurrences": 1920, "samples": 960, "dims": 486, "curvature": "exact:10", "projection": "learned", "recipe": "a.b:c",
        **{k: PLACE[k] for k in ("checkpoints", "query_sets", "has", "can_type", "can_upload", "can_shade")}, "default_queries": "law",
        "loss": when.data["loss"], "quality": QUALITY.as_dict(), "recording": RECORDING.as_dict(), "caveats": ["a caveat"], "missing": ["an image: the recipe has no image="],
        "sign": Influence.sign, "timeline": told,
    }  # fmt: skip
    return View({**known, **more}, when.figures)


def evolution(**more: Any) -> View:
    mean = np.array([[0.04, 0.02, 0.015], [0.001, np.nan, -0.002]])
    groups = (f"early {HOSTILE}", "late")
    result = insight.Evolution((40, 80, 120), groups, mean, np.full((2, 3), 3.0), ("adjoint",) * 3, **ABOUT)
    return View({**result.as_dict(), "queries": "law", "by": "thirds", **more}, result.drawings())


def overwriting(nobody: bool = False) -> View:
    who = tuple(insight.Overwriter(f"law/{k}", 0.01 / (k + 1), 60 + k, 2) for k in range(4))
    numbers = (0.05, 0.01, 0.03, 0.005, 0.025)
    result = insight.Overwriting("law/1", (1, 41), *numbers, () if nobody else who, np.full(120, 1e-4), **ABOUT)
    return View({**result.as_dict(), "queries": "law", "samples": samples_by_id()}, result.drawings())


def samples(**more: Any) -> View:
    items = [sample(k, value=None if k == 3 else 0.01 * (k - 2)) for k in range(5)]
    known = {
        "total": 123,
        "page": 2,
        "per": 5,
        "sort": "value",
        "queries": "law",
        "items": items,
        "caveats": ["a caveat"],
    }
    chosen = {"sources": ["law", "poems", HOSTILE], "labels": ["label 0", "label 1"], "sign": Influence.sign}
    return View({**known, **chosen, **more})


def one_sample(over: View | None = None) -> View:
    uses = Occurrences("law/1", (1, 41, 81), (0.02, -0.005, 0.01), **ABOUT)
    went, helped, hurt = evolution(), (QueryInfluence(0, 0.02),), (QueryInfluence(1, -0.001),)
    near = insight.Neighbours("law/1", tuple(Neighbour(f"law/{k}", 0.9 - 0.2 * k) for k in range(2, 8)), at=120)
    each = insight.OnQueries("law/1", 2, helped, hurt, at=120)
    labels = {str(q): {"label": f"law {q} {HOSTILE}", "path": f"/queries/law/{q}"} for q in range(2)}
    data = {
        "sample": sample(1), "queries": "law", "at": 120, "value": 0.025, "occurrences": uses.as_dict(),
        "evolution": {k: v for k, v in went.data.items() if k not in ("queries", "by")}, "on_queries": each.as_dict(), "query_labels": labels,
        "overwriting": None if over is None else {k: v for k, v in over.data.items() if k not in ("samples", "queries")}, "neighbours": near.as_dict(),
        "samples": samples_by_id(), "missing": [],
    }  # fmt: skip
    drawn = {**uses.drawings(), **went.figures, **({} if over is None else over.figures)}
    return View(data, {k: v for k, v in drawn.items() if k != "by_step"})


def sources(names: tuple[str, ...] = ("law", "poems", HOSTILE), by: str = "source") -> View:
    ends = [(0.4, 0.2, 0.7), (0.1, -0.1, 0.4), (-0.2, -0.4, 0.1)]
    total = tuple(Value(n, ALL, 320, 5, *x) for n, x in zip(names, ends, strict=True))
    matrix = [[0.5, -0.1], [0.05, 0.3], [-0.2, -0.02]]
    clear = [[True, False], [False, True], [True, False]]
    cells = tuple(
        tuple(Value(n, d, 320, 2, x, x - 0.01, x + 0.01) if sure else Value(n, d, 320, 2, x, -1.0, 1.0) for d, x, sure in zip(("law", "poems"), line, known, strict=True))
        for n, line, known in zip(names, matrix, clear, strict=True)
    )  # fmt: skip
    result = insight.Sources(by, names, ("law", "poems"), total, cells, **ABOUT)
    return View(
        {**result.as_dict(), "paths": {n: f"/samples?{by}={k}" for k, n in enumerate(names)}}, result.drawings()
    )


def harmful(count: int = 4, without_last: int = 0, last: int = 41) -> View:
    ranked = [insight.RankedSample(f"law/{k}", 40 + k, -0.02 / (k + 1), 2, last + k) for k in range(count)]
    helped = (insight.RankedSample("law/7", 3, 0.03, 1, 3),)
    result = insight.Harmful(tuple(ranked), helped, without_last, **ABOUT)
    return View({**result.as_dict(), "queries": "law", "samples": samples_by_id()}, result.drawings())


def shown_input(**more: Any) -> dict[str, Any]:
    names = ("set", "index", "text", "image", "label", "model_image", "prediction", "loss", "tokens")
    text = f"The court held.\nA second line. {HOSTILE}"
    stored = {"kind": "stored", "set": "law", "index": 0, "text": text, "label": "law 0"}
    return {**dict.fromkeys(names), **(more or stored)}


WEIGHT = "60% of the total |influence| of the top 6 samples comes from parts of the run where the ranking is reliable (rank correlation of at least 0.5)."


def result(replayed: bool = False, **more: Any) -> View:
    hits = [Hit(f"law/{k}", 40 + k, 0.05 / (k + 1), 2).as_dict() for k in range(3)]
    worst = [Hit(f"law/{k + 3}", 43 + k, -0.03 / (k + 1), 2).as_dict() for k in range(3)]
    steps, values = list(range(120)), [math.sin(t / 9) / 50 for t in range(120)]
    places = [Ranking(a, (*IDS[k:3], *IDS[:k]), tuple(IDS[3:6])) for k, a in enumerate(CHECKPOINTS)]
    known: dict[str, Any] = {
        "headline": "Influence", "words": [WEIGHT], "at": 120, "sign": Influence.sign, "unit": "nats of the query's loss", "caveats": ["a caveat"],
        "origin": "From the recording, by embedded segments.", "to_exact": None, "quality": QUALITY.as_dict(), "recording": RECORDING.as_dict(), "method": "segments", "queries": 1, "occurrences": 1920, "query": 0, "per": "sample", "hits": hits,
        "harmful": worst, "input": shown_input(), "by_step": {"steps": steps, "influence": values, "size": [0.01] * 120}, "checkpoints": CHECKPOINTS,
        "rankings": plain(places) if replayed else None, "samples": samples_by_id(), "seconds": 0.123,
    }  # fmt: skip
    drawn = {"by_step": figures.by_step(steps, values, [0.01] * 120, figures.strip(QUALITY))}
    drawn |= Rankings(tuple(places), at=120).drawings() if replayed else {}
    return View({**known, **more}, {k: v for k, v in drawn.items() if v is not None})


def compared() -> View:
    left, right = result().data, result(replayed=True).data
    ids, steps = np.array(["law/0", "law/4", "law/5"]), np.array([3, 40, 80])
    one, two = (
        Influence(torch.tensor([x]), ids, steps, "str", "adjoint", at=120) for x in ((0.5, -0.1, 0.0), (0.2, 0.1, -0.3))
    )
    made = compare(one, two, top=1)
    return View({**made.as_dict(), "left": left, "right": right}, made.drawings())


def form(**more: Any) -> View:
    def stored(k: int, **shown: Any) -> dict[str, Any]:
        known = {"index": k, "label": f"law {k}", "text": None, "image": None, "prediction": None, "mistake": None}
        return {**known, "path": f"/queries/law/{k}", **shown}

    sets = [
        {"name": "law", "count": 3, "fits": 3, "items": [stored(k, text=f"A text {HOSTILE}") for k in range(2)]},
        {"name": "poems", "count": 1, "fits": 1, "items": [stored(0, label="a seven", image=picture())]},
    ]
    known = {k: PLACE[k] for k in ("checkpoints", "has", "can_type", "can_upload", "can_shade")}
    limits = {"longest_text": 20_000, "most_pieces": 64, "most_hits": 200, "dims": 486, "missing": []}
    return View({**known, "query_sets": sets, "can_predict": False, "mistakes": False, **limits, **more})


def tokens() -> View:
    scores = torch.tensor([[0.01, -0.02, 0.0]], dtype=torch.float64)
    part = insight.TokenInfluence(
        "law/0", 40, scores, scores.sum(1), ("The ", "<script>", " court"), at=120, quality=QUALITY, recording=RECORDING
    )
    return View({"items": [part.as_dict()]})


def failure() -> View:
    return View({"error": {"code": 404, "message": f"there is no {HOSTILE}", "hint": "name another."}})


PAGES: dict[str, Any] = {
    "overview": overview,
    "timeline": timeline,
    "evolution": evolution,
    "overwriting": overwriting,
    "samples": samples,
    "sample": one_sample,
    "sample overwritten": lambda: one_sample(overwriting()),
    "sources": sources,
    "harmful": harmful,
    "query": form,
    "result": result,
    "result replayed": lambda: result(replayed=True),
    "compare": compared,
    "tokens": tokens,
    "health": lambda: View({"ok": True, "busy": 1, "limit": 8}),
    "error": failure,
}
SHAPES = {
    "overview": "Overview",
    "timeline": "Timeline",
    "evolution": "Evolution",
    "overwriting": "Overwriting",
    "samples": "Samples",
    "sample": "SamplePage",
    "sources": "Sources",
    "harmful": "Harmful",
    "query": "QueryForm",
    "result": "QueryResult",
    "compare": "Comparison",
    "tokens": "Tokens",
    "health": "Health",
    "error": "Failure",
}
