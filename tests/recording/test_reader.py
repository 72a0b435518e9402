"""A record reads as it was written; sessions join; broken lines, files and versions are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_realloc.recording.events import PlanInstalled, RunEnded
from lightning_realloc.recording.iteration_record import FORMAT, IterationRecord, is_detailed
from lightning_realloc.recording.rank_recorder import EVENTS_FILE, METRICS_FILE, RecordClock
from lightning_realloc.recording.reader import RecordError, RunReader, read_run
from lightning_realloc.report.runs.sections.run_cost import iteration_seconds
from tests.recording.records import PREDICTION, iteration, started, write_events, write_session


@pytest.mark.parametrize("detailed", [True, False])
def test_an_iteration_reads_as_it_was_written(detailed: bool) -> None:
    written = iteration(3, 2.0, is_detailed=detailed)
    read = IterationRecord.from_json(written.to_json())
    assert read.moves == written.moves and read.peak_bytes == written.peak_bytes
    assert (read.step, read.start, read.end) == (3, 2.0, pytest.approx(3.0))
    assert (read.pieces is None) is not detailed
    assert read.idle_share == pytest.approx(0.1)
    assert sum(sum(named.values()) for named in read.seconds.values()) == pytest.approx(1.0)


def test_fewer_iterations_are_detailed_in_a_longer_run() -> None:
    counts = [sum(map(is_detailed, range(first, last))) for first, last in ((0, 20), (20, 100), (100, 1000))]
    assert counts == [20, 16, 18]
    assert sum(map(is_detailed, range(100_000))) < 100


def test_a_run_reads_as_it_was_written(tmp_path: Path) -> None:
    events = [PlanInstalled(step=0, plan={"calls": {"actor.train": "dp2@0-1"}}), PREDICTION]
    ended = RunEnded(unix_s=1010.0, step=3)
    write_session(tmp_path, started(), [*events, ended])
    run = read_run(tmp_path)
    assert run.problems == ()
    assert run.last.started == started() and run.last.events == (*events, ended)
    assert [row.values["reward"] for row in run.last.metrics] == [0.1, 0.2, 0.3]
    assert [one.step for one in run.last.ranks[1]] == [1, 2, 3]
    assert run.last.baseline_bytes == {0: 50, 1: 50}


def test_a_later_session_replaces_the_iterations_that_it_repeats(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=5)
    write_session(tmp_path, started(unix_s=2000.0, step=3, ranks=1), steps=4)
    first, second = read_run(tmp_path).sessions
    assert [row.step for row in first.metrics] == [1, 2, 3]
    assert [one.step for one in first.ranks[0]] == [one.step for one in first.ranks[1]] == [1, 2, 3]
    assert [one.step for one in second.ranks[0]] == [row.step for row in second.metrics] == [4, 5, 6, 7]
    assert 1 not in second.ranks


def test_a_run_that_resumes_on_a_host_whose_clock_is_behind_keeps_all_rows(tmp_path: Path) -> None:
    write_session(tmp_path, started(unix_s=5000.0), steps=4)
    clock = RecordClock(tmp_path, clock=lambda: 1000.0)  # an hour behind; the latest row is of 5004
    assert clock.now() == pytest.approx(5004.001)
    write_session(tmp_path, started(unix_s=clock.now(), step=2), steps=2)
    first, second = read_run(tmp_path).sessions
    assert [row.step for row in first.metrics] == [1, 2] and [row.step for row in second.metrics] == [3, 4]
    assert all(len(session.ranks) == 2 for session in (first, second))
    assert all(seconds >= 0 for seconds in iteration_seconds(read_run(tmp_path)))
    assert RecordClock(tmp_path, clock=lambda: 9000.0).now() == 9000.0
    assert RecordClock(tmp_path / "new", clock=lambda: 1000.0).now() == 1000.0


def test_a_run_from_the_start_replaces_an_earlier_one(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=5)
    write_session(tmp_path, started(unix_s=2000.0), steps=2)
    (session,) = read_run(tmp_path).sessions
    assert [row.step for row in session.metrics] == [one.step for one in session.ranks[1]] == [1, 2]


def test_broken_lines_are_named_and_the_rest_is_read(tmp_path: Path) -> None:
    write_session(tmp_path, started())
    lines = (tmp_path / METRICS_FILE).read_text().splitlines(keepends=True)
    lines[1:2] = [
        '{"step": 2, "unix_s"\n',
        '["no object"]\n',
        '{"step": 2}\n',
        '{"step":2,"unix_s":1002,"metrics":7}\n',
    ]
    (tmp_path / METRICS_FILE).write_text("".join(lines) + '{"step": 4, "uni')
    (tmp_path / "rank_1.jsonl").unlink()
    with (tmp_path / "rank_0.jsonl").open("ab") as file:
        file.write(b'{"step": 4, "start": 1, "end": 2, "seconds": {"call": 3}}\n\xff\xfe\n' + b"x" * (9 << 20) + b"\n")
        file.write(b'{"step":5,"start":4,"end":5,"seconds":{"call":{"actor.train":1}}}\n')
    run = read_run(tmp_path)
    assert [row.step for row in run.last.metrics] == [1, 3]
    assert [one.step for one in run.last.ranks[0]] == [1, 2, 3, 5]
    assert any("metrics.jsonl has 4 broken lines, the first is line 2" in problem for problem in run.problems)
    assert any("rank_1.jsonl cannot be read" in problem for problem in run.problems)
    assert any("rank_0.jsonl has 3 broken lines" in problem for problem in run.problems)


def test_folders_without_a_record_of_this_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"has no record of a run: events.jsonl is missing; train with callbacks="):
        read_run(tmp_path)
    (tmp_path / EVENTS_FILE).write_text('{"event": "of a later release"}\nnonsense\n')
    with pytest.raises(RecordError, match=r"tells of no start of a run; events.jsonl has 1 broken line"):
        read_run(tmp_path)
    write_events(tmp_path, [started(version=FORMAT + 1)])
    with pytest.raises(RecordError, match=f"was written in version {FORMAT + 1} of the record"):
        read_run(tmp_path)


def test_a_reader_follows_a_run_that_is_written(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=2)
    reader = RunReader(tmp_path)
    assert len(reader.read().last.metrics) == 2
    line = json.dumps({"step": 3, "unix_s": 1003.0, "metrics": {"reward": 0.3}})
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(line[:20])
        file.flush()
        assert len(reader.read().last.metrics) == 2
        file.write(line[20:] + "\n")
    assert [row.step for row in reader.read().last.metrics] == [1, 2, 3]
    write_session(tmp_path, started(unix_s=2000.0, step=3), steps=2)
    assert reader.read() == read_run(tmp_path)


def test_a_file_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=5)
    reader = RunReader(tmp_path)
    reader.read()
    for path in tmp_path.iterdir():
        path.unlink()
    write_session(tmp_path, started(unix_s=3000.0), steps=2)
    assert reader.read() == read_run(tmp_path)


def test_devices_and_pipes_in_place_of_files_are_named_and_not_read(tmp_path: Path) -> None:
    write_session(tmp_path, started())
    (tmp_path / METRICS_FILE).unlink()
    (tmp_path / METRICS_FILE).symlink_to("/dev/zero")
    run = read_run(tmp_path)
    assert run.problems == ("metrics.jsonl cannot be read: it is no regular file",)
    assert [one.step for one in run.last.ranks[0]] == [1, 2, 3]
