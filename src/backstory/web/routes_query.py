"""Paths that ask: by a stored query, typed text, an image or a ready gradient; single tokens; two answers compared."""

from typing import Annotated
from urllib.parse import quote

from fastapi import FastAPI, Path, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from . import asking, comparing, views_form
from . import schemas as shapes
from . import views_query as views_ask
from .asking import MOST_SHADED, Shaded
from .errors import RESPONSES, Refused
from .jobs import ASK, QUICK, REPLAY, SWEEP
from .routes import At, Format, K, Served
from .schemas import LONGEST_NAME, LONGEST_TEXT, Question
from .views_query import Asked
from .views_samples import need_index

Text = Annotated[str | None, Query(min_length=1, max_length=LONGEST_TEXT)]
Set = Annotated[str, Query(max_length=LONGEST_NAME)]
Index = Annotated[int, Query(ge=0, le=10**9)]
IndexOrNone = Annotated[int | None, Query(ge=0, le=10**9)]
Ids = Annotated[list[Annotated[str, Query(max_length=LONGEST_NAME)]], Query(min_length=1, max_length=MOST_SHADED)]
Steps = Annotated[list[Annotated[int, Query(ge=0, le=10**9)]], Query(min_length=1, max_length=MOST_SHADED)]
SHADING = 20  # times the time-out: training is replayed


def add_questions(app: FastAPI, served: Served) -> None:
    """All of them."""
    for add in (_add_stored, _add_asked, _add_tokens):
        add(app, served)


def _add_stored(app: FastAPI, served: Served) -> None:
    opened = served.opened

    @app.get("/queries/{set:path}/{index}", response_model=shapes.Answer, responses=RESPONSES)
    async def stored(
        request: Request,
        name: Annotated[str, Path(alias="set", max_length=LONGEST_NAME)],
        index: Annotated[int, Path(ge=0, le=10**9)],
        at: At = None,
        k: K = 10,
        replay: bool = False,
        format: Format = None,
    ) -> Response:
        """Which samples helped and which hurt on a stored query?"""
        view = lambda: views_ask.answer(opened, views_ask.stored(opened, name, index), at, k, replay)  # noqa: E731
        return await served.shown(request, "answer", view, lane=SWEEP if replay else served.asking(at))

    @app.get("/queries", include_in_schema=False)
    async def numbered(
        request: Request, name: Annotated[str, Query(alias="set", max_length=LONGEST_NAME)], index: Index
    ) -> Response:
        """The fields of a form lead to the query's own path."""
        found = await served.work.do(lambda: need_index(opened, opened.named(name), index))
        return RedirectResponse(f"/queries/{quote(name, safe='')}/{found}", 303)

    @app.get("/compare", response_model=shapes.Comparison, responses=RESPONSES)
    async def compare(
        request: Request,
        name: Annotated[str, Query(alias="set", max_length=LONGEST_NAME)],
        index: Index,
        set2: Set,
        index2: Index,
        at: At = None,
        k: K = 10,
        format: Format = None,
    ) -> Response:
        """Two stored queries side by side."""

        def view() -> shapes.Comparison:
            left, right = views_ask.stored(opened, name, index), views_ask.stored(opened, set2, index2)
            return views_ask.compare(opened, left, right, at, k)

        return await served.shown(request, "compare", view, lane=served.asking(at))

    @app.post("/compare", response_model=shapes.Comparison, responses=RESPONSES, openapi_extra=comparing.documented())
    async def compare_any(request: Request, format: Format = None) -> Response:
        """Two questions of any kind side by side: typed text, images, ready gradients, stored queries."""
        q = await comparing.read(request)
        view = lambda: views_ask.compare(opened, *views_ask.pair(opened, q), q.at, q.k)  # noqa: E731
        return await served.shown(
            request, "compare", view, lane=served.asking(q.at), keeps=q.set is not None and q.set2 is not None
        )


def _add_asked(app: FastAPI, served: Served) -> None:
    opened = served.opened

    @app.get("/ask", response_model=shapes.AskForm, responses=RESPONSES)
    async def form(request: Request, mistakes: bool = False, format: Format = None) -> Response:
        """What can be asked; `mistakes`: of the stored queries those that the model gets wrong."""
        lane = QUICK if opened.own_known() else ASK
        return await served.shown(request, "ask", lambda: views_form.form(opened, mistakes), lane=lane)

    @app.post("/ask", response_model=shapes.Answer, responses=RESPONSES, openapi_extra=asking.documented(Question))
    async def ask(request: Request, format: Format = None) -> Response:
        """Which samples helped and which hurt? For typed text, a ready gradient, or a stored query."""
        q = await asking.read(request, Question)
        view = lambda: views_ask.answer(opened, views_ask.asked(opened, q), q.at, q.k, q.replay)  # noqa: E731
        lane = SWEEP if q.replay else served.asking(q.at)
        return await served.shown(request, "answer", view, lane=lane, keeps=q.set is not None)

    @app.post("/ask/image", response_model=shapes.Answer, responses=RESPONSES, openapi_extra=asking.documented_upload())
    async def upload(request: Request, format: Format = None) -> Response:
        """The same for a PNG image, with a label or for what the model says of it."""
        data, q = await asking.read_upload(request)
        view = lambda: views_ask.answer(opened, views_ask.uploaded(opened, data, q.label), q.at, q.k, q.replay)  # noqa: E731
        lane = SWEEP if q.replay else served.asking(q.at)
        return await served.shown(request, "answer", view, lane=lane, keeps=False)


def _add_tokens(app: FastAPI, served: Served) -> None:
    opened = served.opened

    async def shaded(request: Request, q: Shaded) -> Response:
        if len(q.sample) != len(q.step):
            raise Refused(422, "expected one step for each sample.", "Send sample and step in pairs.")
        hits = list(zip(q.sample, q.step, strict=True))

        def view() -> shapes.Shading:
            question: Asked = views_ask.asked(opened, q)
            return views_ask.tokens(opened, question, hits, q.at)

        return await served.shown(request, "tokens", view, lane=REPLAY, timeout=SHADING * served.work.timeout)

    @app.get("/ask/tokens", response_model=shapes.Shading, responses=RESPONSES)
    async def tokens(
        request: Request,
        sample: Ids,
        step: Steps,
        name: Annotated[str | None, Query(alias="set", max_length=LONGEST_NAME)] = None,
        index: IndexOrNone = None,
        text: Text = None,
        at: At = None,
        format: Format = None,
    ) -> Response:
        """Which tokens of these occurrences carried their influence? Replays training; ask for several at once."""
        return await shaded(request, Shaded(sample=sample, step=step, set=name, index=index, text=text, at=at))

    @app.post(
        "/ask/tokens", response_model=shapes.Shading, responses=RESPONSES, openapi_extra=asking.documented(Shaded)
    )
    async def tokens_asked(request: Request, format: Format = None) -> Response:
        """The same for a question that does not fit into an address."""
        return await shaded(request, await asking.read(request, Shaded))
