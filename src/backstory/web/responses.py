"""The two faces of a path: a page where the request prefers HTML, JSON otherwise."""

from typing import Any
from urllib.parse import quote

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from . import pages
from .errors import Refused, failure, log
from .fields import NAMES
from .state import Opened
from .views import query_sets

UPLOAD, ONLY_PROGRAMS = "/ask/image", ("/ask/tokens", "/sources.csv")


def wants_html(request: Request) -> bool:
    """Whether the request prefers text/html, unless format= says otherwise."""
    if (asked := request.query_params.get("format")) in ("json", "html"):
        return asked == "html"
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


class Faces:
    """Makes responses out of shapes, for one opened run."""

    def __init__(self, opened: Opened) -> None:
        self._prefix: dict[str, Any] = {
            "run": opened.name,
            "query_sets": query_sets(opened),
            "checkpoints": opened.checkpoints,
            "has": opened.catalogue.has,
            "can_type": opened.can_type,
            "can_upload": opened.can_upload,
            "can_shade": opened.can_shade,
        }

    def response(self, request: Request, page: str, shape: BaseModel, code: int = 200) -> Response:
        """The shape as the page `page`, or as JSON."""
        if not wants_html(request):
            return Response(shape.model_dump_json(), code, media_type="application/json")
        known = {} if code == 401 else self._prefix  # who has no token is told nothing of the run
        again = {"again": sent_again(request)} if page == "error" and code != 401 else {}
        return HTMLResponse(pages.render(page, shape, prefix={**known, **_where(request), **again}), code)

    def error(self, request: Request, error: Refused) -> Response:
        """An error, in the face that was asked for."""
        shape = failure(error)
        try:
            made = self.response(request, "error", shape, error.code)
        except Exception:
            log.exception("the page of an error failed")
            made = Response(shape.model_dump_json(), error.code, media_type="application/json")
        made.headers.update(error.headers)
        return made


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
    found = request.query_params
    every = {key: found.getlist(key) for key in found}
    return {"path": request.scope["path"], "params": {k: v if len(v) > 1 else v[0] for k, v in every.items()}}
