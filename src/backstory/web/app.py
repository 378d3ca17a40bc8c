"""The service: every path, what it takes, and which view answers it."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from .. import __version__
from ..errors import BackstoryError
from .errors import RESPONSES, log, refuse
from .jobs import Stopping, Work
from .limits import Guard, Limits
from .responses import Responses
from .routes import Service, add_routes
from .state import State

ABOUT = (
    "Which training samples made the model do that, and when? Every path returns JSON, or a page if the request prefers "
    "text/html. Read-only. Every error has one shape: {error: {code, message, hint}}."
)


def make_app(
    state: State, *, limits: Limits | None = None, queue: int = 32, timeout: float = 30.0, warm: bool = True
) -> ASGIApp:
    """The service for one run; `warm` computes in the background what most pages need."""
    responses, work = Responses(state), Work(queue, timeout)

    async def renew() -> None:
        state.renew()

    app = FastAPI(
        title=f"Backstory: {state.name}",
        version=__version__,
        description=ABOUT,
        responses=RESPONSES,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan(state, work, warm),
        dependencies=[Depends(renew)],
    )

    async def respond(request: Request, error: Exception) -> Response:
        return responses.error(request, refuse(error))

    for kind in (RequestValidationError, ValidationError, HTTPException, BackstoryError, Exception):
        app.add_exception_handler(kind, respond)
    add_routes(app, Service(state, responses, work))
    return Guard(app, limits or Limits(), responses.error)


def _lifespan(state: State, work: Work, warm: bool) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        thread = threading.Thread(target=_warm, args=(state,), name="backstory-warm")
        if warm:
            thread.start()
        yield
        state.stopping.set()  # a sweep in progress ends at its next chunk; Python waits for its threads
        work.close()

    return live


def _warm(state: State) -> None:
    try:
        state.warm()
    except Stopping:
        pass
    except BackstoryError as error:
        log.warning("not computed in advance: %s", error)
    except Exception:  # nobody else would see it: the thread is the service's own
        log.exception("not computed in advance")
