"""One tiny recorded run for all tests of the service, and a client that talks to it in process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.web.recipes import RECIPE, recorded

from backstory.web.app import make_app
from backstory.web.state import State

BASE = "http://127.0.0.1"


@pytest.fixture(scope="session")
def text_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("web") / "text")


@pytest.fixture(scope="session")
def bare_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without embeddings."""
    return recorded(tmp_path_factory.mktemp("web") / "bare", embed=False)


@pytest.fixture(scope="session")
def state(text_run: Path) -> State:
    return State(text_run, RECIPE)


@pytest.fixture(scope="session")
def untrusted(text_run: Path) -> State:
    """The same run without its recipe."""
    return State(text_run)


@pytest.fixture(scope="session")
def client(state: State) -> Iterator[TestClient]:
    with TestClient(make_app(state, warm=False), base_url=BASE) as actual:
        yield actual


@pytest.fixture(autouse=True)
def _going_on(request: pytest.FixtureRequest) -> None:
    """An app that has ended in another test leaves its run, which all share, stopping."""
    for name in ("state", "untrusted", "client"):
        if name in request.fixturenames:
            request.getfixturevalue("untrusted" if name == "untrusted" else "state").stopping.clear()
