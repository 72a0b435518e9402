"""Options, clock, tables, JSON and exit code that all benchmarks share.

A benchmark measures and fills a `BenchmarkReport`; this module prints and writes it. `interleave` times all arms of a
ratio in turns in one process, so that load on the machine slows them equally.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

PACKAGES = ("torch", "transformers", "lightning", "trl")


@dataclass(frozen=True, slots=True)
class Target:
    """One figure to reach."""

    name: str
    value: float
    """Measured value."""
    target: float
    """Value to reach."""
    met: bool


@dataclass(slots=True)
class BenchmarkReport:
    """Rows and targets of one benchmark run, with its machine, versions, seeds and settings."""

    name: str
    seeds: tuple[int, ...] = (0,)
    settings: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    load_before: tuple[float, ...] = field(default_factory=lambda: load_average())
    started_s: float = field(default_factory=time.monotonic)
    group_by: str | None = None
    """Column by whose values rows are printed in tables of their own; None prints one table."""

    def add_row(self, **cells: Any) -> None:
        """Append one row of the table. Its columns are the keys, in the order in which rows first have them."""
        self.rows.append(cells)

    def require_at_least(self, name: str, value: float, target: float) -> None:
        """Record a figure that must not be smaller than ``target``."""
        self.targets.append(Target(name, float(value), float(target), value >= target))

    def require_at_most(self, name: str, value: float, target: float) -> None:
        """Record a figure that must not be larger than ``target``."""
        self.targets.append(Target(name, float(value), float(target), value <= target))

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "name": self.name,
            "machine": describe_machine(),
            "versions": describe_versions(),
            "load_average": {"before": self.load_before, "after": load_average()},
            "seconds": time.monotonic() - self.started_s,
            "seeds": self.seeds,
            "settings": self.settings,
            "rows": self.rows,
            "targets": [asdict(target) for target in self.targets],
        }

    def write(self, path: Path | None) -> None:
        """Write the report so far as JSON; does nothing if ``path`` is None."""
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_json(), indent=2) + "\n")

    def _tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return title -> rows of each printed table."""
        if self.group_by is None:
            return {self.name: self.rows}
        tables: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            rest = {column: cell for column, cell in row.items() if column != self.group_by}
            tables.setdefault(str(row[self.group_by]), []).append(rest)
        return tables

    def finish(self, options: argparse.Namespace) -> int:
        """Print the tables, write the JSON for ``--json``, and return the exit code of the process."""
        console = Console(width=None if os.isatty(1) else 160)
        for title, rows in self._tables().items():
            console.print(_rows_table(title, rows))
        if self.targets:
            console.print(_targets_table(self.targets))
        self.write(options.json)
        missed = [target.name for target in self.targets if not target.met]
        if missed:
            console.print(f"{len(missed)} of {len(self.targets)} targets missed: {', '.join(missed)}", style="bold red")
        return 1 if missed and options.strict else 0


def make_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the two options of every benchmark."""
    raw = argparse.RawDescriptionHelpFormatter  # keeps lists and paragraphs
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--json", type=Path, metavar="PATH", help="write rows, targets, machine and versions here")
    parser.add_argument("--strict", action="store_true", help="exit with 1 when a target is missed")
    return parser


def be_quiet() -> None:
    """Compute on one thread, and hide Python warnings and log records up to WARNING."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def interleave(
    arms: Mapping[str, Callable[[], object]], *, repeats: int, clock: Callable[[], float] = time.process_time
) -> dict[str, list[float]]:
    """Return ``repeats`` measured seconds of each arm, with the arms in turns.

    The default ``clock`` is CPU time of the process: wall time on a shared machine depends on other processes.
    """
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, run in arms.items():
            begin = clock()
            run()
            seconds[name].append(clock() - begin)
    return seconds


def paired_ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Return the median of slow/fast over the turns, since both measurements of a turn have the same load."""
    return median(s / f for s, f in zip(slow, fast, strict=True))


def load_average() -> tuple[float, ...]:
    """Return the 1, 5 and 15 minute load averages, rounded; empty where the system has none."""
    return tuple(round(load, 2) for load in os.getloadavg()) if hasattr(os, "getloadavg") else ()


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory and accelerator, without names that identify a host."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)
    pages = os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {
        "system": platform.system(),
        "processor": _processor_name(),
        "num_cores": len(affinity(0)) if affinity else os.cpu_count(),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE") if pages else None,
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "num_threads": torch.get_num_threads(),
    }


def describe_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect the figures."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _rows_table(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(title=title)
    for column in columns:
        numeric = all(isinstance(row.get(column, 0), (int, float)) for row in rows)
        table.add_column(column, justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*(_cell(row.get(column, "")) for column in columns))
    return table


def _targets_table(targets: Sequence[Target]) -> Table:
    table = Table(title="targets")
    for column in ("target", "measured", "to reach", "met"):
        table.add_column(column, justify="left" if column in ("target", "met") else "right")
    for target in targets:
        met = "[green]yes[/]" if target.met else "[bold red]no[/]"
        table.add_row(target.name, _cell(target.value), _cell(target.target), met)
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
