"""Paths that show the run: overview, timeline, samples, sources, harmful data, and the files of the pages."""

from collections.abc import Callable
from functools import cache
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Query
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from . import schemas as shapes
from . import views, views_samples
from .errors import ERRORS, RESPONSES, Refused
from .jobs import ASK, QUICK, SWEEP, Work
from .responses import Faces
from .schemas import LONGEST_NAME, LONGEST_TEXT, MOST_A_PAGE, MOST_HITS
from .state import Opened

Name = Annotated[str | None, Query(max_length=LONGEST_NAME)]
Names = Annotated[list[Annotated[str, Query(max_length=LONGEST_NAME)]] | None, Query(max_length=50)]
At = Annotated[int | None, Query(ge=1, le=10**9, description="a checkpoint's step; without it, the final one")]
Step = Annotated[int | None, Query(ge=0, le=10**9)]
K = Annotated[int, Query(ge=1, le=MOST_HITS)]
Last = Annotated[int, Query(ge=0, le=10**9, description="leave out uses in so many of the last steps")]
Format = Annotated[Literal["json", "html"] | None, Query(description="a face, whatever the Accept header prefers")]
Id = Annotated[str, Path(max_length=LONGEST_NAME)]
By = Annotated[Literal["source", "label"] | None, Query(description="what to group by; without it, what the run has")]
Value = Annotated[float | None, Query(allow_inf_nan=False, description="a bound of the value; needs queries")]
Sort = Annotated[Literal["id", "step", "value"], Query(description="value: most negative first")]
PNG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}, "description": "the image"}
}
CSV: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/csv": {"schema": {"type": "string"}}}, "description": "one line for each source"}
}


class Served:
    """What every path needs: the run, the two faces, and the queue."""

    def __init__(self, opened: Opened, faces: Faces, work: Work) -> None:
        self.opened, self.faces, self.work = opened, faces, work

    async def shown(
        self,
        request: Request,
        page: str,
        view: Callable[[], BaseModel],
        *,
        lane: str = QUICK,
        timeout: float | None = None,
        keeps: bool = True,
    ) -> Response:
        """A view's shape in the face that was asked for, both made beside the event loop; `keeps`: what it finds is kept."""
        key = str(request.url) if request.method == "GET" else None
        made = lambda: self.faces.response(request, page, view())  # noqa: E731
        return await self.work.do(made, lane=lane, timeout=timeout, keeps=keeps, key=key)

    def lane(self, known: bool) -> str:
        """Where something is made that takes a sweep over the run unless it is known."""
        return QUICK if known else SWEEP

    def asking(self, at: int | None) -> str:
        """The lane of a question at a checkpoint."""
        return ASK if self.opened.quick(self.opened.step(at)) else SWEEP

    def valued(self, queries: str | None, at: int | None) -> str:
        """The lane of what needs the mean of a query set at a checkpoint."""
        return QUICK if self.opened.mean_known(queries, at) else self.asking(at)


def add_paths(app: FastAPI, served: Served) -> None:
    """All of them."""
    for add in (_add_run, _add_samples, _add_values, _add_files):
        add(app, served)


def _add_run(app: FastAPI, served: Served) -> None:
    opened = served.opened

    @app.get("/", response_model=shapes.Overview, responses=RESPONSES)
    async def overview(request: Request, format: Format = None) -> Response:
        """What was trained, when, on what; with the timeline of the default query set."""
        drawn = opened.default is None or opened.timeline_known(None, None)
        lane = served.lane(drawn and opened.validity_known())
        return await served.shown(request, "overview", lambda: views.overview(opened), lane=lane)

    @app.get("/timeline", response_model=shapes.Timeline, responses=RESPONSES)
    async def timeline(request: Request, queries: Name = None, at: At = None, format: Format = None) -> Response:
        """When did data matter for a query set? With the phases of training."""
        lane = served.lane(opened.timeline_known(queries, at))
        return await served.shown(request, "timeline", lambda: views.timeline(opened, queries, at), lane=lane)

    @app.get("/phases", response_model=shapes.Phases, responses=RESPONSES)
    async def phases(request: Request, queries: Name = None, at: At = None, format: Format = None) -> Response:
        """The phases of training alone."""
        lane = served.lane(opened.timeline_known(queries, at))
        return await served.shown(request, "phases", lambda: views.phases(opened, queries, at), lane=lane)

    @app.get("/health", response_model=shapes.Health, responses=RESPONSES)
    async def health(request: Request, format: Format = None) -> Response:
        """Whether the service lives, and how many questions it has; needs no token."""
        found = shapes.Health(ok=True, busy=served.work.busy, limit=served.work.limit)
        return served.faces.response(request, "health", found)


def _add_samples(app: FastAPI, served: Served) -> None:
    opened = served.opened

    @app.get("/samples", response_model=shapes.Samples, responses=RESPONSES)
    async def samples(
        request: Request,
        text: Annotated[str | None, Query(max_length=LONGEST_TEXT, description="letters in the text or the id")] = None,
        source: Name = None,
        label: Name = None,
        first_step: Step = None,
        last_step: Step = None,
        sort: Sort = "id",
        queries: Name = None,
        min_value: Value = None,
        max_value: Value = None,
        page: Annotated[int, Query(ge=1, le=10**7)] = 1,
        per: Annotated[int, Query(ge=1, le=MOST_A_PAGE)] = 50,
        format: Format = None,
    ) -> Response:
        """Samples by text, source, label, step and value, sorted; with their values where a query set is named."""

        def view() -> shapes.Samples:
            return views_samples.samples(
                opened, text=text, source=source, label=label, first_step=first_step, last_step=last_step,
                sort=sort, queries=queries or None, min_value=min_value, max_value=max_value, page=page, per=per,
            )  # fmt: skip

        lane = served.valued(queries, None) if queries or sort == "value" else QUICK
        return await served.shown(request, "samples", view, lane=lane)

    @app.get("/samples/{id:path}", response_model=shapes.Life, responses=RESPONSES)
    async def life(
        request: Request, id: Id, queries: Name = None, erasers: bool = False, format: Format = None
    ) -> Response:
        """One sample over all of training; `erasers`: also which later samples took over its influence."""
        view = lambda: views_samples.life(opened, id, queries or None, erasers)  # noqa: E731
        lane = served.lane(not erasers and opened.means_known(queries) and opened.each_known(queries))
        return await served.shown(request, "sample", view, lane=lane)

    @app.get("/images/{id:path}", responses={**ERRORS, **PNG}, response_class=Response)
    async def image(request: Request, id: Id) -> Response:
        """The PNG of a sample."""
        return Response(await served.work.do(lambda: views_samples.image(opened, id)), media_type="image/png")


def _add_values(app: FastAPI, served: Served) -> None:
    opened = served.opened

    @app.get("/sources", response_model=shapes.Sources, responses=RESPONSES)
    async def sources(
        request: Request, queries: Names = None, by: By = None, at: At = None, format: Format = None
    ) -> Response:
        """What is each source worth, for which query sets? With 95 % intervals."""
        view = lambda: views.sources(opened, queries, by, at)[1]  # noqa: E731
        return await served.shown(request, "sources", view, lane=SWEEP)

    @app.get("/sources.csv", responses={**ERRORS, **CSV}, response_class=Response)
    async def sources_csv(request: Request, queries: Names = None, by: By = None, at: At = None) -> Response:
        """The same as a table."""
        made = lambda: views.sources_csv(views.sources(opened, queries, by, at)[0])  # noqa: E731
        name = {"Content-Disposition": 'attachment; filename="sources.csv"'}
        return Response(await served.work.do(made, lane=SWEEP), headers=name, media_type="text/csv")

    @app.get("/harmful", response_model=shapes.Harmful, responses=RESPONSES)
    async def harmful(
        request: Request,
        queries: Name = None,
        k: K = 50,
        at: At = None,
        without_last: Last = 0,
        format: Format = None,
    ) -> Response:
        """The samples that hurt most over a query set."""
        view = lambda: views.harmful(opened, queries or None, k, at, without_last)  # noqa: E731
        return await served.shown(request, "harmful", view, lane=served.valued(queries, at))


def _add_files(app: FastAPI, served: Served) -> None:
    @cache
    def files() -> dict[str, tuple[str, bytes]]:
        from .pages import static

        return static()

    @app.get("/static/{name}", include_in_schema=False)
    async def static_file(name: str) -> Response:
        """A file of the pages, from a fixed table."""
        if name not in files():
            raise Refused(404, "there is no such file.", f"The files are {', '.join(files())}.")
        kind, body = files()[name]
        return Response(body, media_type=kind, headers={"Cache-Control": "max-age=3600"})
