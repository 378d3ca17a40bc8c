"""The two formats of a path: a page where the request prefers HTML, JSON otherwise."""

import json
from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from . import pages
from .errors import NAMES, Refusal, failure, log
from .state import State
from .views import View, about

UPLOAD, ONLY_PROGRAMS = "/query/image", ("/query/tokens", "/sources.csv")


def wants_html(request: Request) -> bool:
    """Whether the request prefers text/html, unless format= says otherwise."""
    if (chosen := request.query_params.get("format")) in ("json", "html"):
        return chosen == "html"
    weights = _accepted(request.headers.get("accept", "*/*"))
    return weights.get("text/html", 0.0) > weights.get("application/json", 0.0)


def _accepted(header: str) -> dict[str, float]:
    """Media types of an Accept header with their weights."""
    out: dict[str, float] = {}
    for part in header.split(",")[:50]:
        kind, *more = (x.strip().lower() for x in part.split(";"))
        given = next((x[2:] for x in more if x.startswith("q=")), "1")
        out[kind] = float(given) if given.replace(".", "", 1).isdecimal() else 0.0
    return out


class Responses:
    """Makes responses out of views, for one run."""

    def __init__(self, state: State) -> None:
        self._prefix: dict[str, Any] = {"run": state.name, "embed": state.embed_command, **about(state)}

    def make(self, request: Request, page: str, view: View, code: int = 200) -> Response:
        """The view as the page `page`, or as JSON."""
        if not wants_html(request):
            return Response(to_json(view.data), code, media_type="application/json")
        known = {} if code == 401 else self._prefix  # who has no token learns nothing of the run
        again = {"again": sent_again(request)} if page == "error" and code != 401 else {}
        return HTMLResponse(pages.render(page, view, prefix={**known, **_where(request), **again}), code)

    def error(self, request: Request, error: Refusal) -> Response:
        """An error, in the format that was asked for."""
        data = failure(error)
        try:
            made = self.make(request, "error", View(data), error.code)
        except Exception:
            log.exception("the page of an error failed")
            made = Response(to_json(data), error.code, media_type="application/json")
        made.headers.update(error.headers)
        return made


def to_json(data: dict[str, Any]) -> str:
    """Compact JSON of plain values; a number that is not finite is a defect."""
    return json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))


def sent_again(request: Request) -> dict[str, Any] | None:
    """The form that was sent, with what was typed, so that it can be mended and sent again; None where there was none."""
    post, path = request.method == "POST", request.scope["path"]
    sent = [*getattr(request.state, "sent", {}).items()] if post else request.query_params.multi_items()
    fields = [(name, NAMES[name], value) for name, value in sent if name in NAMES and name != "format"]
    named = ["image"] if path == UPLOAD else getattr(request.state, "images", [])
    images = [(name, NAMES[name]) for name in named] if post else []
    if request.method not in ("GET", "POST") or path in ONLY_PROGRAMS or not (fields or images):
        return None
    return {"action": quote(path), "method": "post" if post else "get", "fields": fields, "images": images}


def _where(request: Request) -> dict[str, Any]:
    params = request.query_params
    every = {key: params.getlist(key) for key in params}
    return {"path": request.scope["path"], "params": {k: v if len(v) > 1 else v[0] for k, v in every.items()}}
