"""Commands ``report`` and ``runs``: show how a run learns and where its time goes, and list many runs."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path, PurePosixPath

from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.errors import ConfigError
from lightning_realloc.output_files import write_text
from lightning_realloc.remote_output import local_copy
from lightning_realloc.remote_path import AnyPath, as_path, local_folder, local_path
from lightning_realloc.report.runs.charts import Json
from lightning_realloc.report.runs.page import page_data, render_page
from lightning_realloc.report.runs.run_folder import (
    BROKEN_CONTENT,
    RunFolder,
    RunFolderReader,
    find_runs,
    read_run_folder,
)
from lightning_realloc.report.runs.run_index import (
    RunSummary,
    differing_settings,
    regressions,
    score_cell,
    summarize_run,
)
from lightning_realloc.report.runs.sections.run_cost import duration
from lightning_realloc.report.runs.text import markdown_report
from lightning_realloc.tables import aligned

_LOG_SUFFIXES = (".jsonl", ".csv", ".yaml")
"""Endings of the files that reports read; a run's address may hold checkpoints, too."""
_MAX_SETTINGS = 3
"""Settings in which runs differ that a line shows; more make it long."""
_MAX_CELL = 60
"""Characters of a cell; a longer one is cut."""
_ORDERS: Mapping[str, Callable[[RunSummary], float]] = {
    "date": lambda one: one.begin_s or 0.0,
    "score": lambda one: -math.inf if one.score is None else one.score[1].value,
    "reward": lambda one: -math.inf if one.reward is None else one.reward,
    "hours": lambda one: one.device_hours or 0.0,
}


def run_report(arguments: Sequence[str], write: Callable[[str], object]) -> int:
    """Write a report, and return the exit code.

    Raises:
        ConfigError: for a wrong flag, a folder without a run, and a file that cannot be written.
    """
    chosen = _parse(arguments)
    output = None if chosen.output is None else local_path(chosen.output, "--output")
    form = chosen.format or _format_of(output)
    output = output or local_folder(chosen.run) / f"report.{form}"
    data = _content(chosen.run, chosen.compare, chosen.price_per_gpu_hour)
    text = {"html": render_page, "md": markdown_report, "json": _as_json}[form](data)
    if str(output) in ("-", "/dev/stdout"):
        write(text)
        return 0
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_text(output, text)
    except OSError as error:
        raise ConfigError(f"--output={output} cannot be written ({error.strerror}); name another file") from None
    write(f"{output}\n")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser("report", epilog="Record runs with callbacks=[Timeline()].")
    parser.add_argument("run", type=as_path, help="folder or address of a run; the newest record in it or below counts")
    parser.add_argument("--output", help="file, or - for the terminal; default: report.html in the folder")
    parser.add_argument("--format", choices=("html", "md", "json"), help="default: by --output, else html")
    parser.add_argument("--compare", type=as_path, nargs="+", metavar="RUN", default=[], help="further runs")
    parser.add_argument(
        "--price-per-gpu-hour", type=float, metavar="PRICE", help="price of a device-hour, for the cost"
    )
    return parser.parse(arguments)


def _format_of(output: Path | None) -> str:
    ending = "" if output is None else output.suffix.lstrip(".")
    return ending if ending in ("md", "json") else "html"


def _content(folder: AnyPath, others: Sequence[AnyPath], price: float | None) -> Json:
    if price is not None and not 0 <= price < math.inf:
        raise ConfigError(f"--price-per-gpu-hour={price} must be a number of at least 0")
    runs: dict[str, RunFolder] = {}
    for given in (folder, *others):
        run = _read_run(given)
        place = str(run.log_folder.resolve() if isinstance(run.log_folder, Path) else run.log_folder)
        if place in runs:
            raise ConfigError(
                f"{runs[place].name} and {run.name} are the same run, {place}; give --compare another one"
            )
        runs[place] = run
    first, *compared = runs.values()
    return page_data(first, compared, price=price)


def _read_run(folder: AnyPath) -> RunFolder:
    """Return the run in a folder, or at an address, from which the files of its log are copied."""
    with local_copy(folder, wanted=lambda name: PurePosixPath(name).suffix in _LOG_SUFFIXES) as local:
        run = read_run_folder(local)
        below = PurePosixPath(str(run.log_folder)).relative_to(str(local))
        return replace(run, name=str(folder), log_folder=folder / str(below))


def _as_json(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n"


def run_runs(arguments: Sequence[str], write: Callable[[str], object]) -> int:
    """List the runs below a folder, and return the exit code.

    Raises:
        ConfigError: for a wrong flag, a folder without a run, and a baseline that is none of them.
    """
    parser = CommandParser("runs", epilog="Record runs with callbacks=[Timeline()]; the one-line commands do.")
    parser.add_argument("folder", type=Path, help="folder that holds the outputs of runs, at any depth")
    parser.add_argument("--sort", choices=tuple(_ORDERS), default="date", help="order, the largest first")
    parser.add_argument("--limit", type=int, default=50, help="most runs to list; default: 50")
    parser.add_argument(
        "--baseline", metavar="RUN", help="run to compare all others with: its name in the list, or its folder"
    )
    parser.add_argument("--json", action="store_true", help="write JSON instead of a table")
    chosen = parser.parse(arguments)
    if chosen.limit < 1:
        raise ConfigError(f"--limit={chosen.limit} must be at least 1")
    found = [_read_line(name, path) for name, path in find_runs(chosen.folder).items()]
    found.sort(key=lambda one: _ORDERS[chosen.sort](one[1]), reverse=True)
    kept = found[: chosen.limit]
    runs = [run for run, _ in kept if run is not None]
    baseline = _baseline(chosen.baseline, chosen.folder, [run for run, _ in found if run is not None])
    sentences = regressions(runs, baseline)
    settings = dict(zip((run.name for run in runs), differing_settings(runs), strict=True))
    if chosen.json:
        lines = [{**one.to_json(), "settings": settings.get(one.name, {})} for _, one in kept]
        write(json.dumps({"runs": lines, "regressions": sentences}, indent=1) + "\n")
    else:
        write(_table([one for _, one in kept], settings, len(found) - len(kept)) + "\n")
        write("".join(f"\n{sentence}" for sentence in sentences) + ("\n" if sentences else ""))
    return 0


def _read_line(name: str, folder: Path) -> tuple[RunFolder | None, RunSummary]:
    """Return a run and its line; a damaged one is None, and its line says what cannot be read."""
    try:
        run = replace(RunFolderReader(folder, is_brief=True).read(), name=name)
        return run, summarize_run(run)
    except (ConfigError, OSError, *BROKEN_CONTENT) as error:
        return None, RunSummary(name=name, end="damaged", problems=(str(error),))


def _baseline(name: str | None, folder: Path, runs: Sequence[RunFolder]) -> RunFolder | None:
    """Return the run with a name of the list, or the newest one in a folder or below, as for ``report``."""
    if name is None:
        return None
    found = [run for run in runs if run.name == name.rstrip("/")]
    for place in (Path(name), folder / name):
        if not found and place.is_dir():
            with suppress(ConfigError):  # a folder without a run is none of the list, as the error below says
                log = Path(str(RunFolderReader(place, is_brief=True).read().log_folder)).resolve()
                found = [run for run in runs if Path(str(run.log_folder)).resolve() == log]
    if not found:
        raise ConfigError(f"--baseline={name} is none of the runs; give one of {', '.join(run.name for run in runs)}")
    return found[0]


def _table(lines: Sequence[RunSummary], settings: Mapping[str, Mapping[str, str]], num_left_out: int) -> str:
    head = ["run", "began", "algorithm", "iterations", "score", "reward", "iteration", "hours", "plan", "settings", ""]
    rows = [head, *(_row(one, settings.get(one.name, {})) for one in lines)]
    used = [at for at in range(len(head)) if any(row[at] not in ("", "–") for row in rows[1:])]
    shown = [[row[at] for at in used] for row in rows]
    left = [place for place, at in enumerate(used) if head[at] not in ("iterations", "reward", "iteration", "hours")]
    more = f"\n  ... and {num_left_out} more; see --limit" if num_left_out else ""
    problems = [f"{one.name}: {problem}" for one in lines for problem in one.problems]
    return aligned(shown, left=left) + more + "".join(f"\n{problem}" for problem in problems)


def _row(one: RunSummary, settings: Mapping[str, str]) -> list[str]:
    began = "–" if one.begin_s is None else f"{datetime.fromtimestamp(one.begin_s):%Y-%m-%d %H:%M}"
    differing = [f"{name.rpartition('.')[2]}={value}" for name, value in settings.items()]
    others = f" +{len(differing) - _MAX_SETTINGS}" if len(differing) > _MAX_SETTINGS else ""
    cells = [
        one.name,
        began,
        one.algorithm or "–",
        str(one.num_iterations),
        score_cell(one),
        "–" if one.reward is None else f"{one.reward:.3g}",
        "–" if one.iteration_s is None else duration(one.iteration_s),
        "–" if one.device_hours is None else f"{one.device_hours:.2f}",
        one.plan or "–",
        " ".join(differing[:_MAX_SETTINGS]) + others,
        "" if one.end in ("ended", "unknown") else one.end,
    ]
    return [cell if len(cell) <= _MAX_CELL else f"{cell[: _MAX_CELL - 1]}…" for cell in cells]
