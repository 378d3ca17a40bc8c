"""What commands print: within 80 columns, whatever the names and numbers are; and progress, by a clock that is set by hand."""

import io

import pytest
from rich.console import Console

from backstory.cli import output
from backstory.results.influence import RankedSample


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "out", Console(width=80, force_terminal=False))


def lines(text: str) -> list[str]:
    out = [line.rstrip() for line in text.splitlines()]
    assert all(len(line) <= 80 for line in out), text
    return out


def test_long_texts_are_cut_and_long_names_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    name = "a/very/long/path/" * 4
    some = [RankedSample(name, 5, 0.01, text="[red]\x1b[31m\n" + "word " * 99, source="law")]
    output.hits("Helped most", some)
    printed = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")] for line in lines(printed) if "│" in line]
    assert "".join(row[0] for row in rows[1:]) == name, "an id is shown in full"
    assert rows[0][1:] == ["source", "step", "influence", "text"]
    assert "\x1b" not in printed
    output.hits("Helped most", [RankedSample(1, 5, 0.01, text="[red]\n" + "word " * 99)])
    (_, row) = [line for line in lines(capsys.readouterr().out) if "│" in line]
    assert row.endswith("…")
    assert "[red] word word" in row


def test_numbers_stand_right_and_an_empty_ranking_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    output.table("Two", ("name", "value"), [("a", "+0.1"), ("b", "-1.23e-05")])
    assert lines(capsys.readouterr().out)[-2:] == [" a    │      +0.1", " b    │ -1.23e-05"]
    output.hits("Hurt most", [])
    assert capsys.readouterr().out == "\nHurt most: none\n"


def test_as_many_columns_as_fit_with_the_first_and_the_last() -> None:
    assert output.spread(5, 6) == [0, 1, 2, 3, 4]
    assert output.spread(21, 6) == [0, 4, 8, 12, 16, 20]
    assert output.spread(9, 2) == [0, 8]
    for count in range(1, 60):
        for most in range(2, 12):
            places = output.spread(count, most)
            assert (places[0], places[-1], len(places)) == (0, count - 1, min(count, most))
            assert places == sorted(set(places))


@pytest.mark.parametrize("cell", ["+0.1", "+0.12", "-0.123", "+0.0123", "-0.00123", "-1.23e-05"])
def test_columns_that_fit_fill_the_line(cell: str, capsys: pytest.CaptureFixture[str]) -> None:
    names, cells = [str(k) for k in range(50)], [[cell] * 50]
    count = output.columns_that_fit(names, ("group", "early"), cells)
    for n, fit in ((count, True), (count + 1, False)):
        output.table("", ("group", *names[:n]), [("early", *cells[0][:n])])
        assert ("early" + f" │ {cell}" * n in capsys.readouterr().out) == fit


def test_a_sparkline_goes_from_the_smallest_to_the_largest() -> None:
    assert output.sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert output.sparkline([-1.0, float("nan"), 1.0]) == "▁ █"
    assert output.sparkline([2.0, 2.0]) == "▁▁"


def test_a_wild_value_does_not_flatten_a_sparkline(capsys: pytest.CaptureFixture[str]) -> None:
    values = [float(k % 8) for k in range(43)]
    for wild, mark in ((500.0, "↑"), (-500.0, "↓")):
        values[20] = wild
        assert output.sparkline(values) == 2 * "▁▂▃▄▅▆▇█" + "▁▂▃▄" + mark + "▆▇█" + 2 * "▁▂▃▄▅▆▇█" + "▁▂▃"
        output.curves("Size", {"size": values})
        printed = capsys.readouterr().out
        assert f"{mark} off the scale: {'500' if wild > 0 else '-500'}" in printed
        assert "0 to 7\n" in printed


def test_neighbouring_steps_share_a_block() -> None:
    assert output.binned([1.0, 3.0, 5.0, 7.0], 2) == [2.0, 6.0]
    assert output.binned([1.0, 3.0], 4) == [1.0, 1.0, 3.0, 3.0]
    assert output.binned([1.0, float("nan")], 1) == [1.0]
    values = [float(k) for k in range(113)]
    means = output.binned(values, 50)
    assert len(means) == 50
    assert (means[0], means[-1]) == (0.5, 111.0)
    assert means == sorted(means)


def test_curves_are_labelled_and_fill_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    size, nothing = [float(k) for k in range(1000)], [float("nan")] * 1000
    output.curves("Size", {"size": size, "mean": [-1.23456e-5 * x for x in size], "loss": nothing})
    _, title, first, second, axis = lines(capsys.readouterr().out)
    assert title == "Size"
    assert first.startswith("size  ▁")
    assert first.endswith("█  9.5 to 990")
    assert second.endswith("▁  -0.0122 to -0.000117")
    assert axis.startswith("      step 0 ")
    assert axis.endswith("step 999")
    assert len(axis) == first.rindex("█") + 1
    output.curves("Nothing", {"loss": nothing})
    assert capsys.readouterr().out == ""


class Clock:
    """Time that passes when it is told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    file = io.StringIO()
    monkeypatch.setattr(output, "err", Console(file=file, width=80))
    return file


def test_short_work_shows_no_progress(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for terminal in (False, True):
        monkeypatch.setattr(output, "err", Console(file=stream, width=80, force_terminal=terminal))
        clock = Clock()
        with output.progress(clock) as report:
            for done in range(20):
                clock.now += 0.09
                report("embed", done + 1, 20)
        assert stream.getvalue() == ""


def test_long_work_prints_a_line_every_few_seconds_without_a_terminal(stream: io.StringIO) -> None:
    clock = Clock()
    with output.progress(clock) as report:
        for done in range(1, 1201):
            clock.now += 0.01
            report("embed", done, 1200)
        report("query", 1, 1)
        clock.now += 5
        report("query", 1, 2)
    assert stream.getvalue().splitlines() == [
        "embed: 200/1,200 (17%, about 10 seconds left)", "embed: 700/1,200 (58%, about 5 seconds left)",
        "embed: 1,200/1,200 (100%)", "query: 1/2 (50%)",
    ]  # fmt: skip


def test_a_terminal_shows_bars(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "err", Console(file=stream, width=80, force_terminal=True))
    clock = Clock()
    with output.progress(clock) as report:
        report("embed", 1, 4)
        clock.now += 2
        report("embed", 3, 4)
    assert "embed" in stream.getvalue()
    assert "3/4" in stream.getvalue()
