"""Pages out of shapes: Jinja2 templates in which everything is escaped, and the files that they need.

render("answer", shape, prefix={...})        the HTML of a path
static()                                     style sheet, script and Plotly, by name
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape
from pydantic import BaseModel

from ..results.figures import HELPED, HURT, Figure
from ..results.words import WORD
from . import figures, words
from . import schemas as shapes
from .ranking import last_use
from .schemas_run import MOST_EACH
from .words import labelled

LONG = 700  # characters of a sample beside others; its own page has all
HERE = {
    "timeline": "/",
    "phases": "/",
    "overview": "/",
    "samples": "/samples",
    "sample": "/samples",
    "sources": "/sources",
}
HERE |= {"harmful": "/harmful", "ask": "/ask", "answer": "/ask", "compare": "/ask", "tokens": "/ask"}
TWINS = frozenset(HERE) - {"tokens"} | {"health"}
TIMELINE = (
    "Mean over the occurrences of a step of their influence on the query set's mean loss, divided by the step's learning rate: loss "
    "per unit of rate. Above zero: the step's samples helped; below zero: they hurt. The dotted line is their mean size without the sign. The "
    "pattern over time is sought in it, and the coloured bands are the three phases, where they were found."
)


def render(name: str, shape: BaseModel, *, prefix: Mapping[str, Any]) -> str:
    """The page `name` for a shape; `prefix` says which run and which request it belongs to."""
    prefix = {**prefix, "params": {k: _single(v) for k, v in prefix.get("params", {}).items()}}
    own = OWN[name](shape, prefix) if name in OWN else {}
    drawn = {k: f for k, f in FIGURES.get(name, lambda _: {})(shape).items() if f is not None}
    place = {"prefix": prefix, "params": prefix["params"], "sets": _names(prefix), "here": HERE.get(name)}
    more = {"figures": drawn, "timeline_words": TIMELINE, "twin": _twin(name, prefix)}
    return environment().get_template(f"{name}.html").render(it=shape, **place, **more, **own)


def static() -> dict[str, tuple[str, bytes]]:
    """Every file that a page asks for: name -> (content type, bytes)."""
    from plotly.offline import get_plotlyjs

    return {
        "style.css": ("text/css; charset=utf-8", _file("style.css")),
        "page.js": ("text/javascript; charset=utf-8", _file("page.js")),
        "plotly.min.js": ("text/javascript; charset=utf-8", get_plotlyjs().encode()),
    }


@lru_cache(maxsize=1)
def environment() -> Environment:
    """Templates with escaping always on."""
    made = Environment(loader=PackageLoader("backstory.web"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters |= FILTERS
    return made


# -- filters -----------------------------------------------------------------------------------------------------


def signed(x: float | None) -> str:
    """A number with its sign, three digits, and a true minus: +0.0123."""
    return "not known" if x is None else _written(f"{x:+.3g}")


def plain(x: float | None) -> str:
    """A number that needs no sign, in the same format: 0.0123."""
    return "not known" if x is None else _written(f"{x:.3g}")


def _written(number: str) -> str:
    minus = f"−{number[1:]}" if number.startswith("-") else number
    return re.sub(r"e([+-])0*(\d+)", _power, minus)


def _power(found: re.Match[str]) -> str:
    raised = found[2].translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f" × 10{'⁻' if found[1] == '-' else ''}{raised}"


def sign_words(x: float) -> str:
    """The sign in a word."""
    return "helped" if x > 0 else "hurt" if x < 0 else "had no influence"


def count(n: int) -> str:
    """1234 as 1,234."""
    return f"{n:,}"


def when(text: str) -> str:
    """A moment in ISO form as people say it; anything else as it is."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M}" + (f" {moment.tzname()}" if moment.tzinfo else "")


def shortened(text: str, longest: int = LONG) -> str:
    """The beginning of a long text."""
    return text if len(text) <= longest else text[: longest - 1] + "…"


def marked(text: str, common: Iterable[str]) -> Markup:
    """The text, escaped, with the words in common with the query marked."""
    known, out, end = {w.casefold() for w in common}, Markup(), 0
    for found in WORD.finditer(text):
        if found[0].casefold() in known:
            out += escape(text[end : found.start()]) + Markup("<mark>{}</mark>").format(found[0])
            end = found.end()
    return out + escape(text[end:])


def most(items: Sequence[Any]) -> float:
    """The largest size of an influence."""
    return max((abs(x.influence) for x in items), default=0.0)


def share(x: float, largest: float) -> str:
    """|x| as a part of the largest, for the length of a bar."""
    return f"{min(1.0, abs(x) / largest):.3f}" if largest > 0 else "0"


FILTERS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (signed, plain, labelled, sign_words, count, when, shortened, marked, most, share, last_use)
}


# -- what a page needs beside its shape ---------------------------------------------------------------------------


def _of_timeline(it: shapes.Timeline) -> dict[str, Figure | None]:
    return {"timeline": figures.timeline(it), "loss": figures.loss(it.loss)}


def _of_overview(it: shapes.Overview) -> dict[str, Figure | None]:
    return {"timeline": None if it.timeline is None else figures.timeline(it.timeline), "loss": figures.loss(it.loss)}


def _of_answer(it: shapes.Answer) -> dict[str, Figure | None]:
    replay = it.replay or []
    helpful = figures.places(it.helpful, replay, "helpful", HELPED)
    return {
        "pace": figures.pace(it.timeline),
        "replay_helpful": helpful,
        "replay_harmful": figures.places(it.harmful, replay, "harmful", HURT),
    }


def _of_sample(it: shapes.Life) -> dict[str, Figure | None]:
    return {
        "evolution": figures.evolution(it.evolution),
        "occurrences": figures.occurrences(it.occurrences),
        "erasers": figures.erasers(it.erased_by or []),
    }


FIGURES: dict[str, Callable[[Any], dict[str, Figure | None]]] = {
    "overview": _of_overview,
    "timeline": _of_timeline,
    "answer": _of_answer,
    "sample": _of_sample,
    "sources": lambda it: {"sources": figures.sources(it), "matrix": figures.matrix(it)},
    "harmful": lambda it: {"harmful": figures.harmful(it.items)},
    "compare": lambda it: {"compare": figures.compared(it.left.timeline, it.right.timeline)},
}


def _samples(it: shapes.Samples, prefix: Mapping[str, Any]) -> dict[str, Any]:
    kept = {k: v for k, v in prefix["params"].items() if v not in ("", None)}
    return {
        "last_page": max(1, math.ceil(it.total / it.per)),
        "at_page": lambda page: "/samples?" + urlencode({**kept, "page": page}, doseq=True),
    }


def _answer(it: shapes.Answer, prefix: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the question that is asked again for single tokens; none where that cannot be asked."""
    asked: dict[str, Any] = {"set": it.query.set, "index": it.query.index, "text": it.query.text, "at": it.at}
    wanted = {"stored": ("set", "index", "at"), "text": ("text", "at")}.get(it.query.kind, ())
    return {"shade": {k: asked[k] for k in wanted} if prefix.get("can_shade") else {}}


def _sample(it: shapes.Life, prefix: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: n for name, n in _counts(prefix) if n > MOST_EACH}
    first = f" (of the first {MOST_EACH} of {known[it.queries]:,})" if it.queries in known else ""
    said = {"of_first": first, "evolution_words": words.evolution(it), "occurrences_words": words.occurrences(it)}
    return {"erasers_query": urlencode({**prefix["params"], "erasers": "true"}, doseq=True), **said}


def _sources(it: shapes.Sources, prefix: Mapping[str, Any]) -> dict[str, Any]:
    return {"csv_query": "?" + urlencode({"queries": it.domains, "by": it.by}, doseq=True)}


def _harmful(it: shapes.Harmful, prefix: Mapping[str, Any]) -> dict[str, Any]:
    return {"lateness": words.lateness(it)}


OWN: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "samples": _samples,
    "answer": _answer,
    "sample": _sample,
    "sources": _sources,
    "harmful": _harmful,
}


def _twin(name: str, prefix: Mapping[str, Any]) -> str | None:
    """The same page as JSON; None where it was asked for by POST."""
    path = prefix.get("path")
    if not path or name not in TWINS or (path.startswith("/ask") and name != "ask"):
        return None
    if name == "compare" and "set" not in prefix["params"]:
        return None
    return f"{quote(path)}?{urlencode({**prefix['params'], 'format': 'json'}, doseq=True)}"


def _single(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _counts(prefix: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [
        (q["name"], q["count"]) if isinstance(q, Mapping) else (q.name, q.count) for q in prefix.get("query_sets", ())
    ]


def _names(prefix: Mapping[str, Any]) -> list[str]:
    return [q["name"] if isinstance(q, Mapping) else getattr(q, "name", q) for q in prefix.get("query_sets", ())]


def _file(name: str) -> bytes:
    return resources.files("backstory.web").joinpath("static", name).read_bytes()
