"""`backstory serve` and `backstory report`: a run over HTTP, as pages and as JSON; and as one HTML file."""

import errno
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import BackstoryError, UsageError
from . import output, recipes
from .options import Json, RecipeName, RunPath, TrustRecipe

if TYPE_CHECKING:
    from ..web.limits import Limits
    from ..web.state import State

TOKEN = "BACKSTORY_TOKEN"
REPORT_NEEDS = ("plotly", "jinja2", "pydantic", "fastapi")
SHORTEST = 16  # characters of a token


def report(
    run: RunPath,
    out: Annotated[Path, typer.Option("--out", "-o", help="The file to write.")] = Path("report.html"),
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:INDEX]",
            help="A query set of the run or its recipe, or one query of it by index; if not given, the first set.",
        ),
    ] = None,
    recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False,
    json: Json = False,
) -> None:
    """Write a run's report as one HTML file that needs no network. The file contains training data."""
    output.need(*REPORT_NEEDS, extra="web")
    output.writable(out)
    write_report(run, recipes.confirm(run, recipe, trust_recipe), out, queries)
    if json:
        output.emit({"report": str(out)})
        return
    output.line(f"Report: {out} (it contains training data)")


def write_report(run: str | Path, recipe: str, out: Path, queries: str | None = None, **more: Any) -> None:
    """The report of a run into a file; `more` goes to `gather`."""
    from ..web.report import gather, render_report
    from ..web.state import State

    out.write_text(render_report(gather(State(run, recipe, queries=queries), **more)), encoding="utf-8")


def serve(
    run: RunPath,
    recipe: RecipeName = None,
    trust_recipe: TrustRecipe = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; beyond this machine a token is required.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on (0 picks a free one).", min=0, max=65535)] = 8321,
    token_file: Annotated[
        Path | None, typer.Option(help=f"File with the token that requests must carry (or set {TOKEN}).")
    ] = None,
    queue: Annotated[int, typer.Option(help="Maximum queued requests; further ones get HTTP 429.", min=1)] = 32,
    timeout: Annotated[float, typer.Option(help="Time limit of a request, in seconds.", min=0.1)] = 30.0,
    max_bytes: Annotated[int, typer.Option(help="Maximum size of a request, in bytes.", min=1024)] = 1 << 20,
    memory: Annotated[float, typer.Option(help="Memory for embeddings and weights, in GiB.", min=0)] = 4.0,
) -> None:
    """Serve a run as a web page, and as JSON at the same paths. Read-only.

    Without --recipe or --trust-recipe, code that the run names is not imported unless it is part of Backstory; queries that
    need the model are then not available.
    """
    output.need("fastapi", "uvicorn", "jinja2", "python_multipart", "PIL", "plotly", extra="web")
    output.line(f"Loading {run} …")
    import torch

    from ..run.run import Run
    from ..web.limits import Limits, loopback

    token = _token(token_file)
    if not loopback(host) and token is None:
        raise UsageError(
            f"{host} can be reached from other machines, and there is no token. Give one with --token-file or {TOKEN} "
            "(such as `openssl rand -hex 32`), or listen on 127.0.0.1."
        )
    required = recipe is not None or trust_recipe
    name = recipes.confirm(run, recipe, trust_recipe) if required else recipes.shipped_recipe(run)
    torch.set_num_threads(1)  # several requests at once; replays repeat bit for bit
    Run(run)  # a path that is no run is refused before anything is loaded
    limits = Limits(token=token, most_bytes=max_bytes, any_host=token is not None)
    _listen(run, name, required, host, port, limits, queue, timeout, int(memory * 2**30))


def _listen(
    run: Path, recipe: str | None, required: bool, host: str, port: int, limits: "Limits", queue: int, timeout: float, room: int
) -> None:  # fmt: skip
    import uvicorn

    from ..web.app import make_app

    place = bound(host, port)  # before anything is loaded: what cannot be served need not be
    state = _open(run, recipe, required, room)
    for line in state.missing():
        output.line(f"note: {line}")
    config = uvicorn.Config(
        make_app(state, limits=limits, queue=queue, timeout=timeout), host=host, port=port,
        log_level="warning", server_header=False, timeout_graceful_shutdown=3,
    )  # fmt: skip
    name = f"[{host}]" if ":" in host else host
    output.line(f"{state.name}: http://{name}:{place.getsockname()[1]}  (press Ctrl+C to stop)")
    try:
        uvicorn.Server(config).run(sockets=[place])
    finally:
        state.stopping.set()  # also where the service has not come up: Python waits for its threads


def _open(run: Path, recipe: str | None, required: bool, room: int) -> "State":
    """The run with its recipe; where that cannot be had and is not required, without it."""
    from ..run.run import Run
    from ..web.state import State

    config = Run(run).config
    if recipe is None and config.get("recipe") is not None:
        output.line(f"note: {recipes.described(run)}, was not imported.")
    try:
        return State(run, recipe, room=room)
    except BackstoryError as error:
        if required or recipe is None:
            raise
        output.line(f"note: {recipes.described(run)}, cannot be used: {error}")
        return State(run, None, room=room)


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens at this place, which nobody else has."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)  # whoever comes from now on is answered as soon as the service runs
    except OSError as error:
        listener.close()
        raise UsageError(_cannot(host, port, error)) from None
    listener.set_inheritable(True)
    return listener


def _cannot(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"port {port} of {host} is in use by another program, perhaps another `backstory serve`. "
            "Choose another with --port, or let --port 0 pick a free one."
        )
    return f"cannot listen on {host}, port {port} ({error.strerror or error}). Choose another address with --host and --port."


def _token(file: Path | None) -> str | None:
    """The token of the file, or of the environment; too short a one is refused."""
    try:
        token = os.environ.get(TOKEN) if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise UsageError(f"the token file {file} cannot be read ({error}). Give a text file with one line.") from None
    if token is None or (not token and file is None):
        return None
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError(
            f"the token must have {SHORTEST} or more printable ASCII characters and no spaces, got {len(token)} characters. "
            "Generate one with `openssl rand -hex 32`."
        )
    return token
