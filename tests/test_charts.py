"""Charts are well-formed pictures whose axes have round numbers and whose points are where the values are."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from hetero.charts import Line, line_chart, log_ticks, show, ticks
from hetero.series import Series

SVG = "{http://www.w3.org/2000/svg}"


def chart(values: list[float], **options: object) -> ElementTree.Element:
    line = Line("loss", Series(enumerate(values, 1)))
    return ElementTree.fromstring(line_chart("loss", [line], **options))  # type: ignore[arg-type]


def curve(svg: ElementTree.Element, kind: str = "line") -> list[tuple[float, float]]:
    (path,) = svg.iterfind(f"{SVG}path[@class='{kind}']")
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path.attrib["d"])]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (2.1, 4.4, [2.5, 3, 3.5, 4]), (-3, 11, [0, 5, 10]), (7, 7, [7])],
)
def test_ticks_are_round_and_within_the_values(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_logarithmic_ticks_are_powers_of_ten_and_their_halves_where_there_is_room() -> None:
    assert log_ticks(0.5, 60) == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])
    assert log_ticks(1e-9, 1e3)[0] == pytest.approx(1e-9)
    assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in log_ticks(1e-9, 1e3))


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (2e-4, "0.0002"),
        (2e-5, "2e-5"),
        (0.0025, "0.0025"),
        (3.14159, "3.142"),
        (12345.6, "12,346"),
        (3e9, "3e9"),
        (-0.5, "-0.5"),
    ],
)
def test_numbers_are_shown_as_people_read_them(value: float, shown: str) -> None:
    assert show(value) == shown


def test_points_are_in_proportion() -> None:
    (x1, y1), (x2, y2), (x3, y3) = curve(chart([1.0, 2.0, 4.0]))
    assert x3 - x2 == pytest.approx(x2 - x1, abs=0.2)
    assert y2 - y3 == pytest.approx(2 * (y1 - y2), abs=0.3)


def test_logarithmic_axis_is_in_proportion_of_ratios_where_values_spread_far() -> None:
    (_, y1), (_, y2), (_, y3) = curve(chart([1.0, 10.0, 100.0], log=None))
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)
    (_, y1), (_, y2), (_, y3) = curve(chart([0.0, 10.0, 100.0], log=None))  # 0 has no logarithm
    assert y2 - y3 == pytest.approx(9 * (y1 - y2), abs=0.5)


def test_long_curve_is_drawn_by_few_points_with_its_spike() -> None:
    values = [1.0 + (step == 6000) for step in range(10_000)]
    text = line_chart("loss", [Line("loss", Series(enumerate(values)))])
    assert len(text) < 40_000
    highest = min(y for _, y in curve(ElementTree.fromstring(text), "range"))
    assert highest == min(y for _, y in curve(chart([1.0, 2.0, 1.0])))  # drawn as high as where it is alone


def test_hover_says_step_and_value_of_every_curve() -> None:
    lines = [Line("a", Series([(1, 0.5), (2, 0.25)])), Line("<b>", Series([(2, 0.125)]), 1)]
    svg = ElementTree.fromstring(line_chart("busy", lines, percent=True))
    said = [hit.findtext(f"{SVG}title") for hit in svg.iterfind(f"{SVG}rect[@class='hit']")]
    assert said == ["step 1\na 50.0%", "step 2\na 25.0%\n<b> 12.5%"]


def test_names_show_literally_and_a_chart_of_nothing_says_so() -> None:
    svg = ElementTree.fromstring(line_chart('a & "b" <c>', []))
    assert svg.find(f"{SVG}text").text == 'a & "b" <c>'  # type: ignore[union-attr]
    assert "no step yet" in "".join(svg.itertext())


def test_one_step_is_a_dot() -> None:
    assert len(chart([3.0]).findall(f"{SVG}circle")) == 1
