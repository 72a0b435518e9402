from __future__ import annotations

from pathlib import Path

from benchmarks.report import write_record
from lightning_realloc.report.runs.page import page_data
from lightning_realloc.report.runs.run_folder import read_run_folder


def test_the_synthetic_record_is_one_of_a_whole_run(tmp_path: Path) -> None:
    write_record(tmp_path, iterations=40, ranks=3)

    data = page_data(read_run_folder(tmp_path))

    assert data["problems"] == []
    assert ["iterations", "40 of 40, ended"] in data["facts"]
    assert ["ranks", "3 on 1 host"] in data["facts"]
