"""Start here and the how-to pages: what a reader sees runs, in order, in an empty folder.

Python blocks of a page share one scope. A block that begins with `# name.py` is a file: it is saved, and runs when a `console` block runs it
or another block imports it. A `text` block is what the block before it prints; numbers depend on the data, so only words are compared.
Pages that import `train` go on where Start here ends. There is no network in a test: the digits are scikit-learn's, as the page says.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import typer
from fastapi.testclient import TestClient
from typer.testing import CliRunner

import backstory
from backstory.cli.app import app
from backstory.demo import digits
from backstory.demo.data import DataError
from backstory.web.app import make_app
from backstory.web.state import State

ROOT = Path(__file__).parents[2]
START = ROOT / "docs" / "start.md"
HOW_TO = ROOT / "docs" / "how-to"
TASKS = sorted({page.stem for page in HOW_TO.glob("*.md")} - {"index"})
MODULES = ("train", "showing")  # files that pages save
Scope = dict[str, Any]


class Block(NamedTuple):
    language: str
    code: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in re.findall(r"^```(\w+)\n(.*?)^```", page.read_text(), flags=re.M | re.S)]


class Project:
    """A reader's folder: files that pages save, and one scope for what is typed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scope: Scope = {"__name__": "page"}

    def work_through(self, page: Path) -> str:
        """Run every block; returns everything that was printed."""
        printed, last = [], ""
        for block in blocks(page):
            if block.language == "text":
                assert words(last) == words(block.code), f"{page.name} shows another output:\n{last}"
            elif block.language in ("python", "console"):
                last = self._run(page.name, block)
                printed.append(last)
        return "".join(printed)

    def _run(self, page: str, block: Block) -> str:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if block.language == "console":
                for command in commands(block.code):
                    self.command(*command)
            elif name := re.match(r"# (\w+)\.py\n", block.code):
                sys.modules.pop(name[1], None)
                (self.folder / f"{name[1]}.py").write_text(block.code)
            else:
                exec(compile(block.code, page, "exec"), self.scope)
        return out.getvalue()

    def command(self, program: str, *args: str) -> None:
        """One line of a console block."""
        if program == "python":
            runpy.run_path(str(self.folder / args[0]), run_name="__main__")
        elif program == "backstory" and args[0] in ("serve", "plan"):  # one does not end, the other is slow
            parse(*args)
        elif program == "backstory":
            result = CliRunner().invoke(app, args)
            assert result.exit_code == 0, f"backstory {' '.join(args)}: {result.output} {result.exception!r}"
            print(result.stdout)
        elif program == "curl":
            print(self.fetch(*args))
        elif program == "pip":
            extras_exist(args)
        else:
            raise AssertionError(f"no test knows the program {program!r}")

    def fetch(self, *args: str) -> str:
        """What the service of `runs/digits` gives for a curl command."""
        body = args[args.index("-d") + 1] if "-d" in args else None
        (url,) = (x for x in args if x.startswith("localhost:"))
        service = make_app(State(self.folder / "runs" / "digits", "train:recipe"))
        with TestClient(service, base_url="http://localhost") as client:
            path = url.partition("/")[2]
            answer = client.get(path) if body is None else client.post(path, json=json.loads(body))
        assert answer.status_code == 200, answer.text
        return answer.text


def commands(text: str) -> list[list[str]]:
    """The lines after `$`, as a shell splits them; a backslash goes on."""
    joined = text.replace("\\\n", " ")
    return [shlex.split(line[2:]) for line in joined.splitlines() if line.startswith("$ ")]


def parse(*args: str) -> None:
    """The command and its options exist; nothing runs."""
    name, *rest = args
    with contextlib.ExitStack() as stack:
        group: Any = typer.main.get_command(app)
        stack.enter_context(group.commands[name].make_context(name, rest))


def extras_exist(args: tuple[str, ...]) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in re.findall(r"\[(.*?)\]", " ".join(args)):
        assert set(name.split(",")) <= set(known), f"pyproject.toml has no extra of {name}"


def words(text: str) -> str:
    return re.sub(r"[-+−]?\d[\d,.]*", "#", text).strip()


def no_network() -> None:
    raise DataError("there is no network in a test")


@pytest.fixture(autouse=True)
def _like_a_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No network; the working folder is the project's, and modules that pages save are forgotten afterwards."""
    torch.manual_seed(0)
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@contextlib.contextmanager
def inside(folder: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "mnist_5k", no_network)
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, Scope]:
    """The folder where Start here ends, what it printed, and its scope."""
    project = Project(tmp_path_factory.mktemp("start"))
    with inside(project.folder):
        printed = project.work_through(START)
    for name in MODULES:
        sys.modules.pop(name, None)
    return project.folder, printed, project.scope


def test_start_here_traces_a_mistake(started: tuple[Path, str, Scope]) -> None:
    folder, printed, scope = started
    assert scope["predicted"][scope["i"]] != scope["y"][scope["i"]]
    assert scope["changes"][0] > 0, "without the sample that helped most, the loss rises"
    assert "measured on 4 single queries of `test`." in printed, "a run that is open sees what a command measured since"
    assert backstory.open(folder / "runs" / "digits").checkpoints


CHECKS: dict[str, Callable[[Scope, str], object]] = {}


def check(task: str) -> Callable[[Callable[[Scope, str], object]], object]:
    def keep(function: Callable[[Scope, str], object]) -> object:
        CHECKS[task] = function
        return function

    return keep


@check("pytorch")
def _(scope: Scope, printed: str) -> None:
    assert backstory.open("runs/loop").n_steps == 20
    assert backstory.open("runs/sampled").config["settings"]["curvature"] == "sampled:1"
    assert backstory.open("runs/lm").config["settings"]["curvature"] == "empirical/6"
    assert scope["run"].content([600])["600"]["source"] == "school"


@check("huggingface")
def _(scope: Scope, printed: str) -> None:
    assert scope["run"].n_steps == 6
    assert scope["result"].top(1)[0].sample == 0, "a text taught itself most"


@check("lightning")
def _(scope: Scope, printed: str) -> None:
    assert scope["run"].n_steps == 12
    assert scope["result"].top(1)[0].sample == 0, "a point taught itself most"
    assert backstory.open("runs/sampled").config["settings"]["curvature"] == "sampled:1"


@check("lora")
def _(scope: Scope, printed: str) -> None:
    assert scope["result"].sum_over([0]) > 0, "a text taught itself"
    assert all("lora_B" in b["name"] for b in backstory.open("runs/b").config["blocks"])
    assert all("lora" in b["name"] for b in scope["run"].config["blocks"])


@check("settings")
def _(scope: Scope, printed: str) -> None:
    assert scope["recorder"].settings.encoding == "float16"
    assert scope["plan"].suggested_rank
    lines = {line.split()[0] for line in printed.splitlines() if line.strip()}
    assert {"disk", "embedding", "slowdown", "one-off", "recorded", "budget"} <= lines


@check("query")
def _(scope: Scope, printed: str) -> None:
    assert scope["every"].method == "embeddings"
    assert scope["margin"].top(1)[0].influence > 0
    assert Path("query.html").exists()
    assert json.loads(next(line for line in printed.splitlines() if line.startswith("{")))["hits"]


@check("harmful")
def _(scope: Scope, printed: str) -> None:
    assert scope["result"].harmful[0].influence < 0
    assert scope["change"] < 0, "without the ten that hurt most, the loss falls"
    assert Path("harmful.csv").read_text().startswith("sample,influence,last,label")


@check("sources")
def _(scope: Scope, printed: str) -> None:
    best = {
        domain: max(row, key=lambda v: v.value)
        for domain, row in zip(scope["sets"], zip(*scope["result"].cells, strict=True), strict=True)
    }
    assert {domain: value.source for domain, value in best.items()} == {"fours": "4", "nines": "9"}
    assert set(scope["halves"].sources) == {"first half", "second half"}
    assert scope["change"] > 0, "half of the data is worth something"


@check("when")
def _(scope: Scope, printed: str) -> None:
    assert scope["timeline"].words
    assert scope["evolution"].words
    assert scope["story"].overwritten_by
    assert Path("timeline.html").exists()


@check("quality")
def _(scope: Scope, printed: str) -> None:
    run = scope["run"]
    kinds = [run.quality(mean=True), run.quality(), run.quality(exact=True)]
    assert [x.measured for x in kinds] == [True] * 3
    assert all(x.sentence in printed for x in kinds)
    assert len(scope["quality"].factors) == 20
    assert "Recorded beside exact, on the mean of `test`" in printed
    assert "Retrained without each of 62 samples" in printed
    assert len(scope["check"].samples) == scope["check"].ends + 30


@check("check")
def _(scope: Scope, printed: str) -> None:
    assert scope["changes"][0] > 0
    assert scope["together"] > scope["result"].sum_over(scope["group"]), "a group is understated"
    assert scope["effect"].corrected.shape == (1, 4)
    assert "bit for bit" in printed


@check("exact")
def _(scope: Scope, printed: str) -> None:
    values = scope["effects"].values
    assert values.shape == (4, len(scope["run"].checkpoints) - 1, 1)
    total = float(scope["reverse"].scores.sum())
    assert abs(float(values[:, -1].sum()) - total) <= 1e-3 * float(scope["reverse"].scores.abs().sum())
    assert "Change of the query's loss when training leaves out each group" in printed


@check("serve")
def _(scope: Scope, printed: str) -> None:
    answers = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert [len(x.get("harmful", ())) for x in answers[:2]] == [3, 3]
    assert "<svg" in Path("report.html").read_text() or "plotly" in Path("report.html").read_text().lower()
    assert list(Path("tables").glob("*.csv"))
    assert not backstory.open("runs/digits").content(sys.modules["train"].train[:2].tolist())


@check("checkpoints")
def _(scope: Scope, printed: str) -> None:
    assert scope["run"].n_steps == scope["steps"][-1]
    assert scope["result"].top(1)[0].influence > 0
    assert scope["similar"].top(1)[0].influence > 0


@check("large")
def _(scope: Scope, printed: str) -> None:
    assert scope["run"].config["settings"]["encoding"] == "int8"
    assert scope["result"].method == "segments"
    assert backstory.open("runs/digits-small").n_steps == backstory.open("runs/digits").n_steps


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
@pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*Checkpoint directory .* exists")
@pytest.mark.parametrize("task", TASKS)
def test_how_to(task: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page = HOW_TO / f"{task}.md"
    if "import train" in page.read_text():
        shutil.copytree(request.getfixturevalue("started")[0], tmp_path, dirs_exist_ok=True)
    project = Project(tmp_path)
    with inside(tmp_path):
        printed = project.work_through(page)
        CHECKS[task](project.scope, printed)


def test_every_check_has_its_page() -> None:
    assert sorted(CHECKS) == TASKS


@pytest.mark.parametrize("page", [START, *(HOW_TO / f"{task}.md" for task in TASKS)], ids=lambda p: p.stem)
def test_a_page_is_short_and_begins_with_code(page: Path) -> None:
    text = page.read_text()
    prose = len(re.sub(r"^```.*?^```", "", text, flags=re.M | re.S).split())
    assert len(text.split()) <= (900 if page == START else 1500), f"{page.name} has {len(text.split())} words"
    assert prose >= 100
    assert page == START or len(text.partition("```")[0].split()) <= 40, "the code comes first"


@pytest.mark.parametrize("page", [START, *(HOW_TO / f"{task}.md" for task in TASKS)], ids=lambda p: p.stem)
def test_pages_link_to_pages_that_exist(page: Path) -> None:
    """Reference, explanation and measured tables are checked by the site's build."""
    for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
        target = (page.parent / link).resolve()
        assert target.exists() or target.parent not in (HOW_TO, START.parent, ROOT / "examples"), f"{page.name}: {link}"
