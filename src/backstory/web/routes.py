"""Every path: what it takes, which view it shows, and in which lane of the queue that is computed."""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Path, Query
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from . import queries as q
from . import requests, schemas, views
from .errors import Refusal
from .jobs import QUERY, QUICK, REPLAY, SWEEP, Work
from .pages import static
from .requests import IMAGES, MOST_TOKENS, At, Name, Pair, QueryBody, SampleFilter, Step, Text, TokensBody, Top
from .responses import Responses
from .schemas import LONGEST_NAME
from .state import State
from .views import View

REPLAYS = 20  # times the time-out: training is replayed
Named = Name | None
Names = Annotated[list[Name] | None, Query(max_length=50)]
Last = Annotated[int, Query(ge=0, le=10**9, description="ignore uses in this many of the last steps")]
Format = Annotated[requests.Format, Query(description=requests.FORMAT)]
Id = Annotated[str, Path(max_length=LONGEST_NAME)]
By = Annotated[Literal["source", "label"] | None, Query(description="what to group by; by default, what the run has")]
Groups = Annotated[Literal["thirds", "steps", "source", "label"], Query(description="what to group by")]
Set = Annotated[str, Query(alias="set", max_length=LONGEST_NAME)]
Ids = Annotated[list[Name], Query(min_length=1, max_length=MOST_TOKENS)]
Steps = Annotated[list[Step], Query(min_length=1, max_length=MOST_TOKENS)]
PNG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}, "description": "the image"}
}
CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "one line for each source"}
}


class Service:
    """What every path needs: the run, the responses, and the queue."""

    def __init__(self, state: State, responses: Responses, work: Work) -> None:
        self.state, self.responses, self.work = state, responses, work

    async def respond(
        self,
        request: Request,
        page: str,
        view: Callable[[], View],
        *,
        lane: str = QUICK,
        timeout: float | None = None,
        cached: bool = True,
    ) -> Response:
        """A view in the format that was asked for, made beside the event loop; `cached`: whether its result is."""
        key = str(request.url) if request.method == "GET" else None

        def make() -> Response:
            return self.responses.make(request, page, view())

        return await self.work.do(make, lane=lane, timeout=timeout, keeps=cached, key=key)

    def query_lane(self, at: int | None, replay: bool = False) -> str:
        """The lane of a query at a checkpoint, or with `replay` at all of them."""
        return QUERY if self.state.step(at) in self.state.embedded and not replay else SWEEP

    def mean_lane(self, queries: str | None, at: int | None) -> str:
        """The lane of what needs the mean of a query set at a checkpoint."""
        return QUICK if self.state.mean_known(queries, at) else self.query_lane(at)


def add_routes(app: FastAPI, service: Service) -> None:
    """All of them."""
    for add in (_add_run, _add_insight, _add_samples, _add_stored, _add_queries, _add_tokens, _add_files):
        add(app, service)


def _add_run(app: FastAPI, service: Service) -> None:
    state = service.state

    @app.get("/", response_model=schemas.Overview)
    async def overview(request: Request, format: Format = None) -> Response:
        """What was trained, when, on what; with the timeline of the default query set."""
        lane = QUICK if state.timeline_known(None, None) and state.recording_known() else SWEEP
        return await service.respond(request, "overview", partial(views.overview, state), lane=lane)

    @app.get("/health", response_model=schemas.Health)
    async def health(request: Request, format: Format = None) -> Response:
        """Liveness check, and how many requests are queued or running; needs no token."""
        data = {"ok": True, "busy": service.work.busy, "limit": service.work.limit}
        return service.responses.make(request, "health", View(data))


def _add_insight(app: FastAPI, service: Service) -> None:
    state = service.state

    @app.get("/timeline", response_model=schemas.Timeline)
    async def timeline(request: Request, queries: Named = None, at: At = None, format: Format = None) -> Response:
        """When did data matter for a query set? With the phases of training."""
        lane = QUICK if state.timeline_known(queries, at) else SWEEP
        return await service.respond(request, "timeline", partial(views.timeline, state, queries, at), lane=lane)

    @app.get("/evolution", response_model=schemas.Evolution)
    async def evolution(
        request: Request, queries: Named = None, by: Groups = "thirds", ids: Names = None, format: Format = None
    ) -> Response:
        """How does the influence of groups of samples, or of some samples and the rest, change over the checkpoints?"""
        lane = QUICK if state.means_known(queries) else SWEEP
        return await service.respond(request, "evolution", partial(views.evolution, state, queries, by, ids), lane=lane)

    @app.get("/overwriting", response_model=schemas.Overwriting)
    async def overwriting(
        request: Request, sample: Name, queries: Named = None, at: At = None, format: Format = None
    ) -> Response:
        """Which later samples overwrote a sample's influence?"""
        view = partial(views.overwriting, state, queries, sample, at)
        return await service.respond(request, "overwriting", view, lane=SWEEP)

    @app.get("/sources", response_model=schemas.Sources)
    async def sources(
        request: Request, queries: Names = None, by: By = None, at: At = None, format: Format = None
    ) -> Response:
        """What is each source worth, for which query sets? With 95 % intervals."""
        return await service.respond(request, "sources", partial(views.sources, state, queries, by, at), lane=SWEEP)

    @app.get("/sources.csv", responses=CSV, response_class=Response)
    async def sources_csv(request: Request, queries: Names = None, by: By = None, at: At = None) -> Response:
        """The same as a table."""
        view = await service.work.do(partial(views.sources, state, queries, by, at), lane=SWEEP)
        name = {"Content-Disposition": 'attachment; filename="sources.csv"'}
        return Response(views.sources_csv(view.data), headers=name, media_type="text/csv")

    @app.get("/harmful", response_model=schemas.Harmful)
    async def harmful(
        request: Request,
        queries: Named = None,
        top: Top = 50,
        at: At = None,
        without_last: Last = 0,
        format: Format = None,
    ) -> Response:
        """The samples that hurt most over a query set, and those that helped most."""
        view = partial(views.harmful, state, queries, top, at, without_last)
        return await service.respond(request, "harmful", view, lane=service.mean_lane(queries, at))


def _add_samples(app: FastAPI, service: Service) -> None:
    state = service.state

    @app.get("/samples", response_model=schemas.Samples)
    async def samples(request: Request, chosen: Annotated[SampleFilter, Query()]) -> Response:
        """Samples by text, source, label, step and value, sorted; with their values where a query set is named."""
        valued = chosen.queries or chosen.sort == "value"
        lane = service.mean_lane(chosen.queries, None) if valued else QUICK
        return await service.respond(request, "samples", partial(views.samples, state, chosen), lane=lane)

    @app.get("/samples/{id:path}", response_model=schemas.SamplePage)
    async def sample(
        request: Request, id: Id, queries: Named = None, overwriting: bool = False, format: Format = None
    ) -> Response:
        """One sample over all of training; `overwriting`: also which later samples overwrote its influence."""
        view = partial(views.sample, state, id, queries, overwriting)
        lane = QUICK if not overwriting and state.means_known(queries) and state.each_known(queries) else SWEEP
        return await service.respond(request, "sample", view, lane=lane)

    @app.get("/images/{id:path}", responses=PNG, response_class=Response)
    async def image(request: Request, id: Id) -> Response:
        """The PNG of a sample."""
        return Response(await service.work.do(partial(views.image, state, id)), media_type="image/png")


def _add_stored(app: FastAPI, service: Service) -> None:
    state = service.state

    @app.get("/queries/{set:path}/{index}", response_model=schemas.QueryResult)
    async def stored(
        request: Request,
        name: Annotated[str, Path(alias="set", max_length=LONGEST_NAME)],
        index: Annotated[int, Path(ge=0, le=10**9)],
        at: At = None,
        top: Top = 10,
        replay: bool = False,
        format: Format = None,
    ) -> Response:
        """Which samples helped and which hurt on a stored query?"""

        def view() -> View:
            return q.show_influence(state, q.parse_stored(state, name, index), at, top, replay)

        return await service.respond(request, "result", view, lane=service.query_lane(at, replay))

    @app.get("/queries", include_in_schema=False)
    async def numbered(request: Request, name: Set, index: Step) -> Response:
        """The fields of a form lead to the query's own path."""
        number = await service.work.do(lambda: q.need_index(state, state.named(name), index))
        return RedirectResponse(f"/queries/{quote(name, safe='')}/{number}", 303)

    @app.get("/compare", response_model=schemas.Comparison)
    async def compare(
        request: Request,
        name: Set,
        index: Step,
        set2: Name,
        index2: Step,
        at: At = None,
        top: Top = 10,
        format: Format = None,
    ) -> Response:
        """Two stored queries side by side."""

        def view() -> View:
            left, right = q.parse_stored(state, name, index), q.parse_stored(state, set2, index2)
            return q.show_comparison(state, left, right, at, top)

        return await service.respond(request, "compare", view, lane=service.query_lane(at))

    @app.post("/compare", response_model=schemas.Comparison, openapi_extra=requests.document(Pair, IMAGES))
    async def compare_any(request: Request, format: Format = None) -> Response:
        """Two queries of any kind side by side: typed text, images, gradients, stored queries."""
        body = await requests.read_pair(request)

        def view() -> View:
            return q.show_comparison(state, *q.parse_pair(state, body), body.at, body.top)

        cached = body.set is not None and body.set2 is not None
        return await service.respond(request, "compare", view, lane=service.query_lane(body.at), cached=cached)


def _add_queries(app: FastAPI, service: Service) -> None:
    state = service.state

    @app.get("/query", response_model=schemas.QueryForm)
    async def form(request: Request, mistakes: bool = False, format: Format = None) -> Response:
        """What can be queried; `mistakes`: of the stored queries those that the model gets wrong."""
        lane = QUICK if state.evaluations_known() else QUERY
        return await service.respond(request, "query", partial(views.form, state, mistakes), lane=lane)

    @app.post("/query", response_model=schemas.QueryResult, openapi_extra=requests.document(QueryBody))
    async def query(request: Request, format: Format = None) -> Response:
        """Which samples helped and which hurt? For typed text, a gradient, or a stored query."""
        body = await requests.read(request, QueryBody)

        def view() -> View:
            return q.show_influence(state, q.parse_query(state, body), body.at, body.top, body.replay)

        lane = service.query_lane(body.at, body.replay)
        return await service.respond(request, "result", view, lane=lane, cached=body.set is not None)

    @app.post("/query/image", response_model=schemas.QueryResult, openapi_extra=requests.document_upload())
    async def upload(request: Request, format: Format = None) -> Response:
        """The same for a PNG image, with a label or for what the model predicts."""
        data, body = await requests.read_upload(request)

        def view() -> View:
            return q.show_influence(state, q.parse_image(state, data, body.label), body.at, body.top, body.replay)

        lane = service.query_lane(body.at, body.replay)
        return await service.respond(request, "result", view, lane=lane, cached=False)


def _add_tokens(app: FastAPI, service: Service) -> None:
    state = service.state

    async def respond(request: Request, body: TokensBody) -> Response:
        if len(body.sample) != len(body.step):
            raise Refusal(422, "the numbers of samples and steps differ.", "Send one step with each sample.")
        hits = list(zip(body.sample, body.step, strict=True))

        def view() -> View:
            return q.show_tokens(state, q.parse_query(state, body), hits, body.at)

        return await service.respond(request, "tokens", view, lane=REPLAY, timeout=REPLAYS * service.work.timeout)

    @app.get("/query/tokens", response_model=schemas.Tokens)
    async def tokens(
        request: Request,
        sample: Ids,
        step: Steps,
        name: Annotated[Named, Query(alias="set")] = None,
        index: Step | None = None,
        text: Text = None,
        at: At = None,
        format: Format = None,
    ) -> Response:
        """Which tokens of these occurrences carried their influence? Replays training; send several at once."""
        return await respond(request, TokensBody(sample=sample, step=step, set=name, index=index, text=text, at=at))

    @app.post("/query/tokens", response_model=schemas.Tokens, openapi_extra=requests.document(TokensBody))
    async def tokens_of_body(request: Request, format: Format = None) -> Response:
        """The same for a query that does not fit into an address."""
        return await respond(request, await requests.read(request, TokensBody))


def _add_files(app: FastAPI, service: Service) -> None:
    @app.get("/static/{name}", include_in_schema=False)
    async def static_file(name: str) -> Response:
        """A file of the pages, from a fixed table."""
        if name not in static():
            raise Refusal(404, "there is no such file.", f"The files are {', '.join(static())}.")
        kind, body = static()[name]
        return Response(body, media_type=kind, headers={"Cache-Control": "max-age=3600"})
