"""Pages out of views: Jinja2 templates in which everything is escaped, and the files that they need.

render("result", view, prefix={...})         the HTML of a path
static()                                     style sheet, script and Plotly, by name
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib import resources
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from ..results.influence import CORRECTED
from ..results.quality import RANKS, two_digits
from ..results.sign import HELPED, HURT, SIGN, describe_axis, verb, without
from ..results.words import common_words, mark_words, name_label, name_method
from .state import MOST_EACH
from .views import View

LONG = 700  # characters of a sample beside others; its own page has all
HERE = {
    "timeline": "/",
    "overview": "/",
    "evolution": "/",
    "samples": "/samples",
    "sample": "/samples",
    "overwriting": "/samples",
    "sources": "/sources",
}
HERE |= {"harmful": "/harmful", "query": "/query", "result": "/query", "compare": "/query", "tokens": "/query"}
TWINS = frozenset(HERE) - {"tokens"} | {"health"}
STEP = "the step's samples"
TIMELINE = (
    "Mean over the uses of a step of their influence on the query set's mean loss, divided by the step's learning rate: loss "
    f"per unit of learning rate. {describe_axis(STEP, 'they')} The dotted line is the mean |influence|. The "
    "pattern over time is detected in it."
)


def render(name: str, view: View, *, prefix: Mapping[str, Any]) -> str:
    """The page `name` for a view; `prefix` says which run and which request it belongs to."""
    prefix = {"params": {}, **prefix}
    more = EXTRAS[name](view.data, prefix) if name in EXTRAS else {}
    sets = [x["name"] for x in prefix.get("query_sets", ())]
    place = {"prefix": prefix, "params": prefix["params"], "sets": sets, "here": HERE.get(name)}
    place |= {"figures": view.figures, "timeline_words": TIMELINE, "twin": _twin(name, prefix)}
    return environment().get_template(f"{name}.html").render(it=view.data, **place, **more)


@cache
def static() -> dict[str, tuple[str, bytes]]:
    """Every file that a page asks for: name -> (content type, bytes)."""
    from plotly.offline import get_plotlyjs

    return {
        "style.css": ("text/css; charset=utf-8", _file("style.css")),
        "page.js": ("text/javascript; charset=utf-8", _file("page.js")),
        "plotly.min.js": ("text/javascript; charset=utf-8", get_plotlyjs().encode()),
    }


@cache
def environment() -> Environment:
    """Templates with escaping always on."""
    made = Environment(loader=PackageLoader("backstory.web"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    made.filters |= FILTERS
    made.globals |= {"SIGN": SIGN, "HELPED": HELPED, "HURT": HURT, "describe_axis": describe_axis, "RANKS": RANKS}
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


def _power(match: re.Match[str]) -> str:
    raised = match[2].translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f" × 10{'⁻' if match[1] == '-' else ''}{raised}"


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


def marked(text: str, query: str | None) -> Markup:
    """The text, escaped, with the words in common with the query's text marked."""
    pieces = mark_words(text, common_words(text, query or ""))
    return Markup("").join(Markup("<mark>{}</mark>").format(p.text) if p.common else escape(p.text) for p in pieces)


def most(items: Sequence[Any]) -> float:
    """The largest |influence|."""
    return max((abs(x["influence"]) for x in items), default=0.0)


def share(x: float, largest: float) -> str:
    """|x| as a part of the largest, for the length of a bar."""
    return f"{min(1.0, abs(x) / largest):.3f}" if largest > 0 else "0"


def code(text: str) -> Markup:
    """The text, escaped, with what stands between backticks as code."""
    parts = enumerate(text.split("`"))
    return Markup("").join(Markup("<code>{}</code>").format(x) if k % 2 else escape(x) for k, x in parts)


def correction(caveats: Sequence[str]) -> str:
    """Of some caveats, that sizes over time are corrected, as a sentence that ends a caption."""
    return "".join(f" {line[0].upper()}{line[1:]}." for line in caveats if line.startswith(CORRECTED))


def correction_by(quality: Mapping[str, Any] | None) -> str:
    """The same of a result whose steps are shown with the factors of its quality."""
    return correction([f"{CORRECTED} {quality['on']}"] if quality and quality["factors"] else [])


def inside(step: int, spans: Sequence[Sequence[int]]) -> bool:
    """Whether a step lies in one of these spans, first to last."""
    return any(first <= step < last for first, last in spans)


FILTERS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        signed, plain, name_label, name_method, verb, without, common_words, count, when, shortened, marked, most, share,
        code, inside, two_digits, correction, correction_by,
    )
}  # fmt: skip


# -- what a page needs beside its view ------------------------------------------------------------------------------


def _samples(it: Mapping[str, Any], prefix: Mapping[str, Any]) -> dict[str, Any]:
    params = {k: v for k, v in prefix["params"].items() if v not in ("", None)}
    return {
        "last_page": max(1, math.ceil(it["total"] / it["per"])),
        "at_page": lambda page: "/samples?" + urlencode({**params, "page": page}, doseq=True),
    }


def _result(it: Mapping[str, Any], prefix: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the query that is sent again for single tokens; none where these are not available."""
    names = {"stored": ("set", "index"), "text": ("text",)}.get(it["input"]["kind"], ())
    fields = {**{k: it["input"][k] for k in names}, "at": it["at"]}
    texts = any(sample["text"] for sample in it["samples"].values())
    return {"shade": fields if names and texts and prefix.get("can_shade") else {}}


def _sample(it: Mapping[str, Any], prefix: Mapping[str, Any]) -> dict[str, Any]:
    counts = {x["name"]: x["count"] for x in prefix.get("query_sets", ()) if x["count"] > MOST_EACH}
    first = f" (of the first {MOST_EACH} of {counts[it['queries']]:,})" if it["queries"] in counts else ""
    return {"of_first": first, "overwriting_query": urlencode({**prefix["params"], "overwriting": "true"}, doseq=True)}


def _sources(it: Mapping[str, Any], prefix: Mapping[str, Any]) -> dict[str, Any]:
    return {"csv_query": "?" + urlencode({"queries": it["domains"], "by": it["by"]}, doseq=True)}


EXTRAS: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "samples": _samples,
    "result": _result,
    "sample": _sample,
    "sources": _sources,
}


def _twin(name: str, prefix: Mapping[str, Any]) -> str | None:
    """The same page as JSON; None where it came from a POST."""
    path = prefix.get("path")
    if not path or name not in TWINS or (path.startswith("/query") and name != "query"):
        return None
    if name == "compare" and "set" not in prefix["params"]:
        return None
    return f"{quote(path)}?{urlencode({**prefix['params'], 'format': 'json'}, doseq=True)}"


def _file(name: str) -> bytes:
    return resources.files("backstory.web").joinpath("static", name).read_bytes()
