"""The recording's quality as it is sent."""

from backstory.results.quality import EARLY, Quality
from backstory.web.trust import trust


def test_without_a_report_nothing_is_claimed() -> None:
    sent = trust({})
    assert (sent.verdict, sent.words, sent.retained, sent.early) == ("not known", [], None, EARLY)


def test_the_numbers_of_the_report_are_sent() -> None:
    report = Quality(steps=9, retained=0.9, expanding_steps=(3,), drift=float("nan"))
    sent = trust(report.measured())
    assert (sent.retained, sent.expanding_steps, sent.drift) == (0.9, 1, None)
    assert (sent.verdict, sent.reason, sent.words) == (report.verdict, report.reason, list(report.words))
