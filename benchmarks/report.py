"""Seconds and size of the report of a long run on many ranks, and of a dashboard's newer data, from a synthetic record.

Every rank has the iterations of a GRPO run: three calls, a move, waiting and code between calls, with detailed pieces
as often as `Timeline` writes them. Metrics are a rising reward and noise.

Run ``python -m benchmarks.report``; ``--open`` loads the page in Chromium as well, which needs playwright.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.harness import BenchmarkReport, make_parser
from lightning_realloc.recording.events import PlanInstalled, PlanPredicted, RunEnded, RunStarted, event_to_json
from lightning_realloc.recording.iteration_record import FORMAT, IterationRecord, WeightMove, is_detailed
from lightning_realloc.recording.pieces import HOST, WAITING, TimePiece
from lightning_realloc.recording.rank_recorder import EVENTS_FILE, METRICS_FILE, RECORD_FOLDER, JsonLines, rank_file
from lightning_realloc.report.runs.page import page_data, render_page, script_text
from lightning_realloc.report.runs.run_folder import RunFolderReader
from lightning_realloc.tuning.timeline.call_timeline import TimelineEntry

SECONDS, MEGABYTES, OPEN_SECONDS, REFRESH_SECONDS = 60.0, 15.0, 3.0, 2.0
"""Targets: seconds to write a report, its size, seconds until its page is loaded, and seconds of newer data."""
_CALLS = (("actor.generate", 0.5), ("reference.infer", 0.1), ("actor.train", 0.3))
_METRICS = ("actor/kl", "actor/entropy", "actor/grad_norm", "actor/loss", "response_length", "tokens_per_s")


def write_record(folder: Path, *, iterations: int, ranks: int) -> None:
    """Write the record of a run."""
    rng = np.random.default_rng(0)
    everyone = tuple(range(ranks))
    entries, begin = [], 0.0
    for name, seconds in _CALLS:
        entries.append(TimelineEntry(name, 0, everyone, begin, begin + seconds))
        begin += seconds
    events = (
        RunStarted(
            format=FORMAT,
            unix_s=0.0,
            step=0,
            max_steps=iterations,
            algorithm="GRPO",
            devices=("NVIDIA H100",) * ranks,
            hosts=tuple(f"host-{rank // 8}" for rank in everyone),
            precision="bf16-mixed",
            roles={"actor": 7_000_000_000, "reference": 7_000_000_000},
        ),
        PlanInstalled(step=0, plan={"calls": {name: f"dp{ranks}" for name, _ in _CALLS}}),
        PlanPredicted(
            step=2,
            source="data sheets",
            seconds_per_iteration=begin,
            entries=tuple(entries),
            peak_bytes={name: (40 << 30,) * ranks for name, _ in _CALLS},
            memory_budget=80 << 30,
        ),
        RunEnded(unix_s=float(iterations), step=iterations),
    )
    _write_lines(folder / EVENTS_FILE, (event_to_json(event) for event in events))
    for rank in everyone:
        _write_lines(folder / rank_file(rank), [{"rank": {"step": 0, "unix_s": 0.0, "baseline_bytes": 0}}])
    append_iterations(folder, range(iterations), ranks, rng)


def append_iterations(folder: Path, numbers: range, ranks: int, rng: np.random.Generator) -> None:
    """Append iterations by their numbers from 0 to a record."""
    _write_lines(folder / METRICS_FILE, _metrics(numbers, rng))
    for rank in range(ranks):
        _write_lines(folder / rank_file(rank), _iterations(numbers, rng))


def _write_lines(path: Path, lines: Iterable[dict[str, object]]) -> None:
    with closing(JsonLines(path)) as file:
        for line in lines:
            file.write(line)


def _metrics(numbers: range, rng: np.random.Generator) -> Iterator[dict[str, object]]:
    noise = rng.normal(0, 0.1, (len(numbers), len(_METRICS) + 1))
    for at, (reward, *others) in zip(numbers, noise.tolist(), strict=True):
        values = {"reward": at / numbers.stop + reward}
        values |= {name: 1.0 + value for name, value in zip(_METRICS, others, strict=True)}
        yield {"step": at + 1, "unix_s": at + 0.5, "metrics": values}


def _iterations(numbers: range, rng: np.random.Generator) -> Iterator[dict[str, object]]:
    """Yield the lines of a rank: iterations of one second."""
    factors = rng.uniform(0.8, 1.0, (len(numbers), len(_CALLS))).tolist()
    move = WeightMove(0.02, 14 << 30, 14 << 30)
    for at, shares in zip(numbers, factors, strict=True):
        pieces, begin = [TimePiece("-> actor.generate", "move", float(at), 0.02)], at + 0.02
        for (name, longest), factor in zip(_CALLS, shares, strict=True):
            pieces.append(TimePiece(name, "call", begin, longest * factor))
            pieces.append(TimePiece(WAITING, "wait", begin + longest * factor, longest * (1 - factor)))
            begin += longest
        pieces.append(TimePiece(HOST, "host", begin, at + 1 - begin))
        peaks = {name: int(3e10) for name, _ in _CALLS}
        record = IterationRecord.from_pieces(
            at + 1, tuple(pieces), is_detailed=is_detailed(at), moves={"actor.generate": move}, peak_bytes=peaks
        )
        yield record.to_json()


def seconds_to_open(page: Path) -> tuple[float, float]:
    """Return the seconds until Chromium has loaded a page, and until all charts are drawn."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        browser = started.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1440, "height": 900})
        began = time.perf_counter()
        tab.goto(page.as_uri())
        loaded = time.perf_counter() - began
        tab.wait_for_selector("body[data-drawn=true]")
        drawn = time.perf_counter() - began
        browser.close()
    return loaded, drawn


def measure(report: BenchmarkReport, folder: Path, *, iterations: int, ranks: int, with_browser: bool) -> None:
    """Fill a report with seconds, megabytes and targets of a synthetic record in a folder."""
    record = folder / RECORD_FOLDER
    write_record(record, iterations=iterations, ranks=ranks)
    reader = RunFolderReader(folder)
    began = time.process_time()
    run = reader.read()
    read_s = time.process_time() - began
    text = render_page(page_data(run))
    whole_s = time.process_time() - began
    page = folder / "report.html"
    page.write_text(text, encoding="utf-8")
    megabytes = page.stat().st_size / 1e6
    report.add_row(step="read the record", seconds=read_s)
    report.add_row(step="make the page", seconds=whole_s - read_s, MB=megabytes)
    report.require_at_most("seconds of a report", whole_s, SECONDS)
    report.require_at_most("MB of its page", megabytes, MEGABYTES)
    append_iterations(record, range(iterations, iterations + 1), ranks, np.random.default_rng(1))
    began = time.process_time()
    newer = script_text(page_data(reader.read())).encode()
    refresh_s = time.process_time() - began
    report.add_row(step="newer data after an iteration", seconds=refresh_s, MB=len(newer) / 1e6)
    report.require_at_most("seconds of newer data", refresh_s, REFRESH_SECONDS)
    if with_browser:
        loaded_s, drawn_s = seconds_to_open(page)
        report.add_row(step="open the page", seconds=loaded_s)
        report.add_row(step="open it and draw all charts", seconds=drawn_s)
        report.require_at_most("seconds until the page is loaded", loaded_s, OPEN_SECONDS)


def main(arguments: list[str] | None = None) -> int:
    """Write a record, report it, and compare seconds and size with their targets."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--open", action="store_true", help="measure how long Chromium takes to open the page")
    options = parser.parse_args(arguments)
    report = BenchmarkReport("report", settings={"iterations": options.iterations, "ranks": options.ranks})
    with tempfile.TemporaryDirectory() as place:
        measure(report, Path(place), iterations=options.iterations, ranks=options.ranks, with_browser=options.open)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
