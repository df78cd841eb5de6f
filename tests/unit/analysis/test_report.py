"""The report: one file that refers to nothing outside of itself, with every figure in it."""

from __future__ import annotations

from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from mnemic.analysis.report import Contender, loss_curves, show, smooth, text_table, write_report

CONTENDERS = [
    Contender(
        "no memory", {"perplexity": 12.3456, "parameters": 1234567}, [(i, 5 - i / 10) for i in range(1, 30)], "x = 1"
    ),
    Contender("a <b> & c", {"perplexity": 9.5, "parameters": 7}, [(i, 5 - i / 9) for i in range(1, 30)], "<script>"),
]
VOID = {"meta", "br", "img", "hr", "input", "link"}


class Checker(HTMLParser):
    """Collects what a page refers to, and finds tags that are not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture
def page(tmp_path) -> str:
    settings = {"steps": 3, "note": "</pre><script>"}
    write_report(tmp_path / "report.html", "A title & more", CONTENDERS, settings, ["A difference below 1 < 2."])
    return (tmp_path / "report.html").read_text()


def test_it_is_well_formed_and_refers_to_nothing_outside(page: str) -> None:
    found = Checker(page)
    assert found.open == []
    assert all(reference.startswith("#") for reference in found.references)
    assert "http" not in page
    assert "url(" not in page.replace("url(#", "")
    assert "script" not in found.tags
    assert "svg" in found.tags


def test_every_figure_name_sample_and_setting_is_in_it(page: str) -> None:
    text = Checker(page).text
    for expected in (
        "12.35",
        "1,234,567",
        "a <b> & c",
        "<script>",
        "</pre><script>",
        "A difference below 1 < 2.",
        '"steps": 3',
    ):
        assert expected in text


def test_pictures_of_a_memory_are_taken_up(tmp_path) -> None:
    own = Contender(
        "m", {"perplexity": 1.0}, [(1, 1.0), (2, 0.5)], "", {"Slots in use": "<svg><circle r='3'></circle></svg>"}
    )
    write_report(tmp_path / "report.html", "t", [own], {}, [])
    assert "<h2>Slots in use</h2><svg><circle" in (tmp_path / "report.html").read_text()


def test_the_curves_are_whole_and_the_same_each_time() -> None:
    first = loss_curves(CONTENDERS)
    assert first == loss_curves(CONTENDERS)
    named = first.replace("<svg", '<svg xmlns:xlink="x"', 1)
    assert ElementTree.fromstring(named).tag == "svg"
    assert "no memory" in first


@pytest.mark.parametrize("length", [1, 2, 7])
def test_curves_of_a_very_short_run(length: int) -> None:
    short = [Contender(c.name, c.row, c.losses[:length], "") for c in CONTENDERS]
    assert loss_curves(short).startswith("<svg")


def test_smooth_is_a_moving_mean() -> None:
    assert smooth([1.0, 2.0, 6.0, 3.0], 2) == [1.5, 4.0, 4.5]
    assert smooth([1.0, 2.0], 1) == [1.0, 2.0]


def test_the_text_table_is_aligned() -> None:
    assert text_table(CONTENDERS) == (
        "           perplexity  parameters\nno memory       12.35   1,234,567\na <b> & c       9.500           7"
    )


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567, "1,234,567"), (12.3456, "12.35"), (12345.6, "12,346"), (0.5, "0.5000"), (4.0, "4.000")],
)
def test_show(value: float, text: str) -> None:
    assert show(value) == text
