"""Reports of running runs, made again when their files have changed. Several threads may ask for them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_realloc.recording.reader import RunReader, RunRecord
from lightning_realloc.report.live.prometheus import CONTENT_TYPE, exposition
from lightning_realloc.report.live.server import ServedContent, Source
from lightning_realloc.report.runs.page import page_data, render_page, script_text
from lightning_realloc.report.runs.run_folder import read_run_folder

FOLLOWED = ("*.jsonl", "*.csv", "config.yaml")
"""Files of a log folder whose changes a report shows."""


class LiveReport:
    """The report of a run as its files are now, with other runs to compare.

    Args:
        folders: Folders of the runs, as for ``lightning-realloc report``; the report is that of the first.
        data_path: Path at which the page asks for newer data.
    """

    def __init__(self, folders: Sequence[Path], data_path: str) -> None:
        self._folders, self._data_path = folders, data_path
        self._readers: dict[Path, RunReader] = {}
        self._lock = threading.Lock()
        self._tag = ""
        self._data: dict[str, Any] = {}
        self._record: RunRecord | None = None

    def data(self) -> ServedContent:
        """Return the data of the page."""
        tag, data, _ = self._read()
        return ServedContent(script_text(data).encode(), "application/json", tag)

    def page(self) -> ServedContent:
        """Return the page, with the data as they are now."""
        tag, data, _ = self._read()
        return ServedContent(render_page(data, follow=self._data_path).encode(), "text/html; charset=utf-8", tag)

    def record(self) -> RunRecord | None:
        """Return the record of the run; None if it has none."""
        return self._read()[2]

    def _read(self) -> tuple[str, dict[str, Any], RunRecord | None]:
        with self._lock:
            tag = _tag(self._folders)
            if tag != self._tag:
                run, *compared = (read_run_folder(folder, read=self._read_record) for folder in self._folders)
                self._tag, self._data, self._record = tag, page_data(run, compared), run.record
            return self._tag, self._data, self._record

    def _read_record(self, folder: Path) -> RunRecord:
        return self._readers.setdefault(folder, RunReader(folder)).read()


def _tag(folders: Sequence[Path]) -> str:
    """Return a text that changes with the names, sizes and times of the followed files."""
    found = sorted(path for folder in folders for pattern in FOLLOWED for path in folder.rglob(pattern))
    states = []
    for path in found:
        with suppress(FileNotFoundError):  # deleted meanwhile
            state = path.stat()
            states.append((str(path), state.st_size, state.st_mtime_ns))
    return hashlib.sha256(json.dumps(states).encode()).hexdigest()[:16]


def sources_of(folders: Sequence[Path], *, with_prometheus: bool) -> dict[str, Source]:
    """Return path -> source: the report of all runs, that of each of several alone, and Prometheus's figures.

    Raises:
        ConfigError: for a folder without a run, and without a package that is needed.
    """
    together = LiveReport(folders, "/data.json")
    alone = {number: LiveReport([folder], f"/runs/{number}/data.json") for number, folder in enumerate(folders)}
    together.page()  # an error ends the command
    sources: dict[str, Source] = {"/": together.page, "/data.json": together.data}
    for number, report in alone.items():
        sources |= {f"/runs/{number}": report.page, f"/runs/{number}/data.json": report.data}
    if with_prometheus:
        runs = {str(folder): alone[number] for number, folder in enumerate(folders)}
        sources["/metrics"] = lambda: _metrics(runs)
        _metrics(runs)
    return sources


def _metrics(runs: Mapping[str, LiveReport]) -> ServedContent:
    content = exposition({name: record for name, run in runs.items() if (record := run.record()) is not None})
    return ServedContent(content, CONTENT_TYPE, hashlib.sha256(content).hexdigest()[:16])
