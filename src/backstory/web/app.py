"""The service: every path, what it takes, and which view answers it."""

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from .. import __version__
from ..errors import BackstoryError
from .errors import log, refused
from .jobs import Work
from .limits import Guard, Limits
from .responses import Faces
from .routes import Served, add_paths
from .routes_query import add_questions
from .state import Opened, Stopped

ABOUT = (
    "Which training samples made the model do that, and when? Every path answers in JSON, and as a page where the request prefers "
    "text/html. Read-only. Every error has one shape: {error: {code, message, hint}}."
)


def make_app(
    opened: Opened, *, limits: Limits | None = None, queue: int = 32, timeout: float = 30.0, warm: bool = True
) -> ASGIApp:
    """The service for one opened run; `warm` computes in the background what most pages need."""
    faces, work = Faces(opened), Work(queue, timeout)
    app = FastAPI(
        title=f"Backstory: {opened.name}",
        version=__version__,
        description=ABOUT,
        docs_url=None,  # its page would load scripts from elsewhere
        redoc_url=None,
        lifespan=_lifespan(opened, work, warm),
    )

    async def say(request: Request, error: Exception) -> Response:
        return faces.error(request, refused(error))

    for kind in (RequestValidationError, ValidationError, HTTPException, BackstoryError, Exception):
        app.add_exception_handler(kind, say)
    served = Served(opened, faces, work)
    add_paths(app, served)
    add_questions(app, served)
    return Guard(app, limits or Limits(), faces.error)


def _lifespan(opened: Opened, work: Work, warm: bool) -> Callable[[FastAPI], Any]:
    @asynccontextmanager
    async def live(_: FastAPI) -> AsyncIterator[None]:
        thread = threading.Thread(target=_warm, args=(opened,), name="backstory-warm")
        if warm:
            thread.start()
        yield
        opened.stopping.set()  # a sweep in progress ends at its next chunk; Python waits for its threads
        work.close()

    return live


def _warm(opened: Opened) -> None:
    try:
        opened.warm()
    except Stopped:
        pass
    except BackstoryError as error:
        log.warning("not computed in advance: %s", error)
    except Exception:  # nobody else would see it: the thread is the service's own
        log.exception("not computed in advance")
