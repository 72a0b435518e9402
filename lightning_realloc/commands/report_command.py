"""Command ``lightning-realloc report``: show how a run learns and where its time goes."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath

from lightning_realloc.commands.command_parser import CommandParser
from lightning_realloc.errors import ConfigError
from lightning_realloc.output_files import write_text
from lightning_realloc.remote_output import local_copy
from lightning_realloc.remote_path import AnyPath, as_path, local_folder, local_path
from lightning_realloc.report.runs.charts import Json
from lightning_realloc.report.runs.page import page_data, render_page
from lightning_realloc.report.runs.run_folder import RunFolder, read_run_folder
from lightning_realloc.report.runs.text import markdown_report

_LOG_SUFFIXES = (".jsonl", ".csv", ".yaml")
"""Endings of the files that reports read; a run's address may hold checkpoints, too."""


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
    return page_data(_read_run(folder), [_read_run(other) for other in others], price=price)


def _read_run(folder: AnyPath) -> RunFolder:
    """Return the run in a folder, or at an address, from which the files of its log are copied."""
    with local_copy(folder, wanted=lambda name: PurePosixPath(name).suffix in _LOG_SUFFIXES) as local:
        run = read_run_folder(local)
        below = PurePosixPath(str(run.log_folder)).relative_to(str(local))
        return replace(run, name=str(folder), log_folder=folder / str(below))


def _as_json(data: Json) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n"
