"""Reports of running runs, made again when their files have changed. Several threads may ask for them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from lightning_realloc.report.live.prometheus import CONTENT_TYPE, exposition
from lightning_realloc.report.live.server import ServedContent, Source
from lightning_realloc.report.runs.page import page_data, render_page, script_text
from lightning_realloc.report.runs.run_folder import RunFolder, RunFolderReader

FOLLOWED = ("*.jsonl", "*.csv", "config.yaml")
"""Files of a log folder whose changes a report shows."""


class FollowedRun:
    """A run as its files are now, of which only new lines are read.

    Args:
        folder: Folder of the run, as for ``lightning-realloc report``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """Folder of the run."""
        self._reader = RunFolderReader(folder)
        self._lock = threading.Lock()
        self._latest: tuple[str, RunFolder] | None = None

    def read(self) -> tuple[str, RunFolder]:
        """Return a text that changes with the run's files, and the run."""
        with self._lock:
            tag = _tag(self.folder)
            if self._latest is None or self._latest[0] != tag:
                self._latest = tag, self._reader.read()
            return self._latest


def _tag(folder: Path) -> str:
    """Return a text that changes with the names, sizes and times of the followed files."""
    states = []
    for path in sorted(path for pattern in FOLLOWED for path in folder.rglob(pattern)):
        with suppress(FileNotFoundError):  # deleted meanwhile
            state = path.stat()
            states.append((str(path), state.st_size, state.st_mtime_ns))
    return _short_hash(json.dumps(states).encode())


def _short_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


class LiveReport:
    """The report of a run, with other runs to compare.

    Args:
        runs: Runs of the report, which is that of the first.
        data_path: Path at which the page asks for newer data.
    """

    def __init__(self, runs: Sequence[FollowedRun], data_path: str) -> None:
        self._runs, self._data_path = runs, data_path
        self._lock = threading.Lock()
        self._latest: _PageContent | None = None

    def data(self) -> ServedContent:
        """Return the data of the page."""
        latest = self._read()
        return ServedContent(latest.text, "application/json", latest.tag)

    def page(self) -> ServedContent:
        """Return the page, with the data as they are now."""
        latest = self._read()
        page = render_page(latest.data, follow=self._data_path)
        return ServedContent(page.encode(), "text/html; charset=utf-8", latest.tag)

    def _read(self) -> _PageContent:
        with self._lock:
            tags, runs = zip(*(run.read() for run in self._runs), strict=True)
            tag = _short_hash("".join(tags).encode())
            if self._latest is None or self._latest.tag != tag:
                data = page_data(runs[0], runs[1:])
                self._latest = _PageContent(tag, data, script_text(data).encode())
            return self._latest


class _PageContent(NamedTuple):
    """Data of a page at a moment, as values and as text."""

    tag: str
    data: dict[str, Any]
    text: bytes


def sources_of(folders: Sequence[Path], *, with_prometheus: bool) -> dict[str, Source]:
    """Return path -> source: the report of all runs, that of each of several alone, and Prometheus's figures.

    Raises:
        ConfigError: for a folder without a run, and without a package that is needed.
    """
    runs = [FollowedRun(folder) for folder in folders]
    together = LiveReport(runs, "/data.json")
    together.page()  # an error ends the command
    sources: dict[str, Source] = {"/": together.page, "/data.json": together.data}
    for number, run in enumerate(runs):
        alone = LiveReport([run], f"/runs/{number}/data.json")
        sources |= {f"/runs/{number}": alone.page, f"/runs/{number}/data.json": alone.data}
    if with_prometheus:
        sources["/metrics"] = lambda: _metrics(runs)
        _metrics(runs)
    return sources


def _metrics(runs: Sequence[FollowedRun]) -> ServedContent:
    found = {str(run.folder): run.read()[1].record for run in runs}
    content = exposition({name: record for name, record in found.items() if record is not None})
    return ServedContent(content, CONTENT_TYPE, _short_hash(content))
