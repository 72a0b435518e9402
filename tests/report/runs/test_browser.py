"""Open reports in Chromium: charts, search, colors, keyboard, accessibility, and drawing newer data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_realloc.report.runs.charts import Json
from lightning_realloc.report.runs.page import render_page
from tests.report.browsers import DRAWN, serious_barriers, watched_page
from tests.report.runs.folders import HOSTILE, content_of, log_metrics, talk, write_run, write_table, write_talks

pytestmark = pytest.mark.browser
MEASURES = """() => [...document.querySelectorAll('.plot')].map(plot =>
    ({title: plot.closest('figure').querySelector('h3').textContent, points: (plot.data ?? []).reduce(
        (sum, trace) => sum + trace.x.length, 0)}))"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> tuple[Json, Path]:
    folder = write_run(tmp_path_factory.mktemp("run"))
    log_metrics(
        folder,
        {
            "reward": [0.1, 0.3, 0.2, 0.4, 0.5, 0.4, 0.6, 0.7],
            "actor/kl": [0.0, 0.01, 0.02, 0.03, 0.02, 0.02, 0.03, 0.04],
            "tokens_per_s": [100.0, 120.0, 130.0, 125.0, 120.0, 122.0, 130.0, 128.0],
            f"{HOSTILE}/loss": [0.5, 0.25, 0.2, 0.1, 0.1, 0.2, 0.1, 0.0],
        },
    )
    samples = [
        {"step": step, "prompt": f"{HOSTILE} {step}", "response": f"answer {step} " + "word " * 100, "reward": step % 7}
        for step in range(150)
    ]
    write_table(folder / "log" / "version_0" / "rollouts.csv", samples)
    write_talks(folder, [talk(1), talk(2, failure=HOSTILE)])
    data = content_of(folder)
    path = folder / "report.html"
    path.write_text(render_page(data), encoding="utf-8")
    return data, path


@pytest.fixture
def page(browser: Any, report: tuple[Json, Path]) -> Iterator[Any]:
    """Open the report; console errors fail the test."""
    with watched_page(browser, report[1].as_uri()) as page:
        yield page


@pytest.fixture(scope="module")
def shared_page(browser: Any, report: tuple[Json, Path]) -> Iterator[Any]:
    """Open the report once, for tests that change nothing which another one reads."""
    with watched_page(browser, report[1].as_uri()) as page:
        yield page


@pytest.fixture(scope="module")
def narrow_page(browser: Any, report: tuple[Json, Path]) -> Iterator[Any]:
    """Open the report in the size of a phone, in light colors."""
    narrow = {"viewport": {"width": 390, "height": 900}, "color_scheme": "light"}
    with watched_page(browser, report[1].as_uri(), **narrow) as page:
        yield page


@pytest.fixture
def dark_page(browser: Any, report: tuple[Json, Path]) -> Iterator[Any]:
    """Open the report in dark colors."""
    with watched_page(browser, report[1].as_uri(), color_scheme="dark") as page:
        yield page


def test_every_chart_is_drawn_for_paper_at_once(dark_page: Any) -> None:
    printed = """() => {
        setTheme("dark");  // all charts wait for frames, which paper does not have
        dispatchEvent(new Event("beforeprint"));
        const drawn = plot => plot.querySelectorAll(".trace, .point").length;
        const traces = [...document.querySelectorAll(".plot")].map(drawn);
        const paper = [document.documentElement.dataset.theme, document.body.className, Math.min(...traces)];
        dispatchEvent(new Event("afterprint"));
        return [...paper, document.documentElement.dataset.theme, document.body.className];
    }"""

    theme, paper, fewest, theme_after, paper_after = dark_page.evaluate(printed)

    assert (theme, paper, theme_after, paper_after) == ("light", "paper", "dark", "")
    assert fewest > 0


def test_every_chart_has_data(shared_page: Any, report: tuple[Json, Path]) -> None:
    charts = [chart for section in report[0]["sections"] for chart in section["charts"]]

    measured = shared_page.evaluate(MEASURES)

    assert [one["title"] for one in measured] == [chart["title"] for chart in charts]
    assert all(one["points"] > 0 for one in measured), measured


def test_texts_of_a_run_are_shown_and_not_run(browser: Any, report: tuple[Json, Path]) -> None:
    page = browser.new_page()  # with the page's own content policy
    page.goto(report[1].as_uri())
    page.wait_for_selector(DRAWN)

    assert page.title().startswith("Report of ")
    assert page.locator("img").count() == 0
    assert HOSTILE in page.locator("#table-rollouts tbody").inner_text()
    assert f"Failed: {HOSTILE}" in page.locator(".conversation .failure").first.text_content()
    page.close()


def test_search_and_sorting_choose_rows(page: Any) -> None:
    rows = page.locator("#table-rollouts tbody tr")
    assert rows.count() == 25

    page.get_by_label("Search in Samples, the newest first").fill("answer 14")
    assert rows.count() == 11  # 14 and 140 to 149
    page.locator("#table-rollouts th button", has_text="reward").click()
    assert rows.first.locator("td").nth(1).inner_text() == "6"
    page.locator("#table-rollouts th button", has_text="reward").click()
    assert rows.first.locator("td").nth(1).inner_text() == "0"


def test_more_rows_are_shown_on_demand(shared_page: Any) -> None:
    shared_page.get_by_role("button", name="Show more rows").last.click()

    assert shared_page.locator("#table-rollouts tbody tr").count() == 50


def test_a_conversation_unfolds_into_its_turns(page: Any) -> None:
    first = page.locator(".conversation").last
    assert (
        first.locator("summary").first.inner_text()
        == "Iteration 1: 2 turns, 0.75 s of its environment · reward 1.5 · finish reason stop"
    )
    first.locator("summary").first.click()
    turns = first.locator("li")
    assert [turns.nth(at).locator("strong").inner_text() for at in range(4)] == [
        "user",
        "assistant",
        "tool add",
        "assistant",
    ]
    assert turns.nth(1).locator(".call").inner_text() == 'add(a=1, b="zwei ü")'
    assert turns.nth(1).locator("div").inner_text() == "assistant reward 0.5, 0.5 s"
    turns.nth(1).locator("details summary").click()
    assert turns.nth(1).locator("details pre").inner_text() == "I add."


def test_newer_data_keep_zoom_search_and_place(page: Any) -> None:
    page.get_by_label("Search in Samples, the newest first").fill("answer 14")
    page.evaluate("Plotly.relayout(document.querySelector('#chart-reward .plot'), {'xaxis.range': [2, 4]})")
    page.evaluate("scrollTo(0, 700)")
    page.wait_for_function("scrollY === 700")  # from the table, in several steps

    page.evaluate("""() => {
        const data = JSON.parse(document.getElementById('data').textContent);
        const chart = data.sections[0].charts[0];
        chart.series[0].x.push(9);
        chart.series[0].y.push(0.9);
        data.sections.at(-1).tables[0].rows.unshift(['150', 'new', 'answer 14 again', '1']);
        show(data);
    }""")
    page.wait_for_selector(DRAWN)

    assert page.evaluate("document.querySelector('#chart-reward .plot').data[0].x.length") == 9
    assert page.evaluate("document.querySelector('#chart-reward .plot').layout.xaxis.range") == [2, 4]
    assert page.locator("#table-rollouts tbody tr").count() == 12
    assert page.evaluate("scrollY") == 700


def test_the_slider_chooses_an_iteration(shared_page: Any) -> None:
    slider = shared_page.get_by_label("Iteration")
    assert shared_page.locator("#chart-lanes output").inner_text().startswith("8,")

    slider.focus()
    shared_page.keyboard.press("Home")

    assert shared_page.locator("#chart-lanes output").inner_text().startswith("1,")
    names = shared_page.evaluate("document.querySelector('#chart-lanes .plot').data.map(trace => trace.name)")
    assert "predicted" in names


def test_the_keyboard_reaches_contents_colors_tables_and_cells(page: Any) -> None:
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('a, button, input, summary, .scroll').localName"))
    assert {"a", "button", "input", "div"} <= reached

    page.locator("#theme").focus()
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") != before
    page.wait_for_selector(DRAWN)


@pytest.mark.parametrize(("opened", "width", "scheme"), [("narrow_page", 390, "light"), ("dark_page", 1440, "dark")])
def test_pages_fit_and_have_no_serious_barrier(
    request: pytest.FixtureRequest, tmp_path: Path, opened: str, width: int, scheme: str
) -> None:
    page = request.getfixturevalue(opened)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    assert page.evaluate("innerWidth") == width
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert serious_barriers(page) == []


def test_calls_of_one_iteration_differ_in_color(shared_page: Any) -> None:
    colors = shared_page.evaluate("""() => document.querySelector('#chart-lanes .plot').data
        .filter(trace => trace.name !== 'predicted').map(trace => trace.marker.color)""")

    assert len(set(colors)) == len(colors)


def test_legends_are_shown_whole_and_names_in_tables_in_one_line(narrow_page: Any) -> None:
    assert narrow_page.locator(".legend .scrollbar[height]:not([height='0'])").count() == 0
    names = narrow_page.locator("#table-purposes tbody td:first-child")
    assert max(names.nth(at).bounding_box()["height"] for at in range(names.count())) < 40  # of one line
