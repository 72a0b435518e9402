"""Open dashboards in Chromium while runs are written."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from lightning_realloc.recording.events import RunEnded
from lightning_realloc.recording.rank_recorder import METRICS_FILE, JsonLines, rank_file
from tests.recording.records import iteration, started, write_events, write_session
from tests.report.browsers import DRAWN, serious_barriers, watched_page
from tests.report.live.dashboards import dashboard, dashboard_process

pytestmark = pytest.mark.browser
ITERATION_S = 0.1
NUM_RANKS = 2
SHOWN_WITHIN_S = 2.0


class RunningRun:
    """A run that a thread writes at ten iterations a second, after a session of three iterations."""

    def __init__(self, record: Path) -> None:
        write_session(record, started(ranks=NUM_RANKS), steps=3)
        self.step = 3
        """Latest iteration."""
        self._files = [JsonLines(record / name) for name in (METRICS_FILE, *map(rank_file, range(NUM_RANKS)))]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        metrics, *ranks = self._files
        while not self._stop.wait(ITERATION_S):
            step = self.step + 1
            metrics.write({"step": step, "unix_s": 1000.0 + step, "metrics": {"reward": step / 10}})
            for rank in ranks:
                rank.write(iteration(step, float(step - 1)).to_json())
            self.step = step

    def __enter__(self) -> RunningRun:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for file in self._files:
            file.close()


def wait_for_facts(page: Any, text: str, *, timeout_s: float = 30.0) -> None:
    """Wait until the head of the page contains a text."""
    page.wait_for_function(
        "text => document.querySelector('#facts').innerText.includes(text)", arg=text, timeout=1000 * timeout_s
    )


def wait_for_step(page: Any, step: int) -> float:
    """Return the seconds until the head of the page shows an iteration, or a later one."""
    began = time.monotonic()
    shown = "Number(document.querySelector('#facts').innerText.match(/iterations\\s+(\\d+)/)[1])"
    page.wait_for_function(f"step => {shown} >= step", arg=step, timeout=30_000)
    return time.monotonic() - began


@contextmanager
def dashboard_page(browser: Any, *arguments: str, path: str = "") -> Iterator[Any]:
    """Serve runs and open the page; errors of its scripts fail the test."""
    with (
        dashboard(*arguments) as (port, _),
        watched_page(browser, f"http://localhost:{port}/{path}") as page,
    ):
        yield page


def test_a_page_shows_iterations_within_two_seconds(browser: Any, tmp_path: Path) -> None:
    with RunningRun(tmp_path / "record") as run, dashboard_page(browser, str(tmp_path)) as page:
        seconds: list[float] = []
        while len(seconds) < 10 and min(seconds, default=math.inf) > SHOWN_WITHIN_S:  # other tests share the cores
            seconds.append(wait_for_step(page, run.step))

        assert min(seconds) < SHOWN_WITHIN_S, seconds
        assert page.locator("#live").inner_text() == "Following the run"
        page.wait_for_selector(DRAWN)
        assert page.evaluate("document.querySelector('#chart-reward .plot').data[0].x.length") > 3


def test_a_page_follows_a_run_over_its_end_a_resume_and_a_new_start(browser: Any, tmp_path: Path) -> None:
    record = tmp_path / "record"
    write_session(record, started(), [RunEnded(unix_s=1003.0, step=3)], steps=3)
    with dashboard_page(browser, str(tmp_path)) as page:
        wait_for_facts(page, "3 of 10, ended")

        write_session(record, started(unix_s=2000.0, step=2), steps=4)
        wait_for_facts(page, "6 of 10, running or cut off")
        wait_for_facts(page, "2, continued after iteration 2")

        write_events(record, [started(unix_s=3000.0)])
        wait_for_facts(page, "0 of 10")
        write_session(record, started(unix_s=4000.0), steps=1)
        wait_for_facts(page, "1 of 10")
        page.wait_for_selector(DRAWN)
        assert page.evaluate("document.querySelector('#chart-reward .plot').data[0].x") == [1]


def test_charts_and_tables_that_a_new_run_lacks_leave_the_page(browser: Any, tmp_path: Path) -> None:
    write_session(tmp_path / "old" / "record", started())
    with dashboard_page(browser, str(tmp_path)) as page:
        assert page.locator("#chart-lanes").count() == page.locator("#table-purposes").count() == 1

        lines = JsonLines(tmp_path / "new" / "record" / METRICS_FILE)
        lines.write({"step": 1, "unix_s": 5000.5, "metrics": {"actor/kl": 0.1}})
        lines.close()
        write_events(tmp_path / "new" / "record", [started(unix_s=5000.0)])
        page.wait_for_selector("#chart-kl")

        assert page.locator("#chart-lanes").count() == page.locator("#table-purposes").count() == 0
        assert page.locator("#chart-reward").count() == 0


def test_new_charts_stand_where_a_reload_puts_them(browser: Any, tmp_path: Path) -> None:
    titles = "[...document.querySelectorAll('#section-learning h3')].map(title => title.textContent)"
    write_session(tmp_path / "record", started())
    with dashboard_page(browser, str(tmp_path)) as page:
        lines = JsonLines(tmp_path / "record" / METRICS_FILE)
        for step, loss in ((4, 0.2), (5, 0.1)):
            lines.write({"step": step, "unix_s": 1000.0 + step, "metrics": {"val/reward": loss, "actor/loss": loss}})
        lines.close()
        page.wait_for_selector("#chart-loss")
        lines = JsonLines(tmp_path / "record" / METRICS_FILE)
        for step, nats in ((6, 0.2), (7, 0.1)):
            lines.write({"step": step, "unix_s": 1000.0 + step, "metrics": {"actor/kl": nats}})
        lines.close()
        page.wait_for_selector("#chart-kl")
        followed = page.evaluate(titles)

        page.reload()
        page.wait_for_selector(DRAWN)

        assert page.evaluate(titles) == followed


def test_runs_side_by_side_are_followed_together_and_alone(browser: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_session(tmp_path / name / "record", started())
    folders = (str(tmp_path / "a"), str(tmp_path / "b"))
    lines = "document.querySelector('#chart-compared-reward .plot').data.map(trace => trace.x.length)"
    with dashboard_page(browser, *folders) as page:
        assert page.evaluate(lines) == [3, 3]

        metrics = JsonLines(tmp_path / "b" / "record" / METRICS_FILE)
        metrics.write({"step": 4, "unix_s": 1004.0, "metrics": {"reward": 0.9}})
        metrics.close()
        page.wait_for_function(f"{lines}[1] === 4")

        assert page.evaluate(lines) == [3, 4]
        assert serious_barriers(page) == []
    with dashboard_page(browser, *folders, path="runs/1") as page:
        assert page.locator("h1").inner_text() == f"Report of {folders[1]}"
        assert page.locator("#section-comparison").count() == 0


def test_a_page_goes_on_after_its_server_restarts(browser: Any, tmp_path: Path) -> None:
    write_session(tmp_path / "record", started())
    page = browser.new_page(bypass_csp=True)
    with dashboard_process(str(tmp_path), "--port=0") as address:
        page.goto(address)
        page.wait_for_selector(DRAWN)
    page.wait_for_function("document.querySelector('#live').textContent.startsWith('No newer data')")
    write_events(tmp_path / "record", [RunEnded(unix_s=1003.0, step=3)])

    with dashboard_process(str(tmp_path), f"--port={urlsplit(address).port}"):
        wait_for_facts(page, "3 of 10, ended")
        page.wait_for_function("document.querySelector('#live').textContent === 'Following the run'")
    page.close()


def test_a_page_with_a_token_follows_and_others_get_no_content(browser: Any, tmp_path: Path) -> None:
    with (
        RunningRun(tmp_path / "record") as run,
        dashboard_page(browser, str(tmp_path), "--token=a-secret-1", path="?token=a-secret-1") as page,
    ):
        wait_for_step(page, run.step + 3)
        assert serious_barriers(page) == []

        stranger = browser.new_page()
        answer = stranger.goto(page.url.partition("?")[0])
        assert answer.status == 401
        assert stranger.locator("body").inner_text().startswith("this dashboard needs its token")
        stranger.close()
