"""Arrays over ranks and iterations are the same, whether a record is read at once or as it grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_realloc.recording.iteration_record import IterationRecord, WeightMove
from lightning_realloc.recording.pieces import TimePiece
from lightning_realloc.recording.reader import RunReader, RunRecord, Session
from lightning_realloc.report.runs.rank_time import RankTime, RankTimeBuilder
from tests.recording.records import started, write_session

PIECES = (("actor.generate", "call"), ("actor.train", "call"), ("waiting", "wait"), ("-> actor.train", "move"))


def an_iteration(step: int, rng: np.random.Generator) -> IterationRecord:
    """Return an iteration with some of the pieces, moves and peaks."""
    pieces, place = [], float(step)
    for name, kind in PIECES[: rng.integers(1, len(PIECES), endpoint=True)]:
        seconds = float(rng.uniform(0.1, 1.0))
        pieces.append(TimePiece(name, kind, place, seconds))
        place += seconds
    moves = {"actor.train": WeightMove(0.1 * step, step, step)} if rng.random() < 0.5 else {}
    peaks = {"actor.train": int(rng.integers(1000))} if rng.random() < 0.5 else {}
    return IterationRecord.from_pieces(step, tuple(pieces), is_detailed=False, moves=moves, peak_bytes=peaks)


def a_record(*sessions: Mapping[int, Sequence[IterationRecord]]) -> RunRecord:
    """Return a record whose sessions have these iterations by rank."""
    made = (
        Session(started=started(unix_s=float(at)), ranks={rank: tuple(ones) for rank, ones in ranks.items()})
        for at, ranks in enumerate(sessions)
    )
    return RunRecord(Path("record"), tuple(made))


def assert_same(one: RankTime, other: RankTime) -> None:
    assert one.ranks == other.ranks
    np.testing.assert_array_equal(one.steps, other.steps)
    np.testing.assert_array_equal(one.whole, other.whole)
    for mine, others in (
        (one.seconds, other.seconds),
        (one.moves, other.moves),
        (one.peak_bytes, other.peak_bytes),
    ):
        assert mine.keys() == others.keys()
        for key, values in mine.items():
            np.testing.assert_array_equal(values, others[key])


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32 - 1), num_ranks=st.integers(1, 4))
def test_arrays_of_a_growing_record_are_those_of_the_whole(seed: int, num_ranks: int) -> None:
    rng = np.random.default_rng(seed)
    steps = rng.permutation(np.arange(1, 41))  # ranks write at different times, and lines may be missing
    made = {rank: [an_iteration(int(step), rng) for step in steps if rng.random() < 0.9] for rank in range(num_ranks)}
    builder, written = RankTimeBuilder(), dict.fromkeys(made, 0)
    for _ in range(5):
        written = {rank: int(rng.integers(written[rank], len(made[rank]), endpoint=True)) for rank in made}
        record = a_record({rank: ones[: written[rank]] for rank, ones in made.items() if written[rank]})

        assert_same(builder.update(record), RankTimeBuilder().update(record))


def test_arrays_have_the_values_of_their_iterations() -> None:
    rng = np.random.default_rng(0)
    made = {rank: [an_iteration(step, rng) for step in range(1, 31)] for rank in (0, 2)}

    time = RankTimeBuilder().update(a_record(made))

    assert time.ranks == (0, 2)
    assert time.steps.tolist() == list(range(1, 31))
    for row, rank in enumerate(time.ranks):
        for column, one in enumerate(made[rank]):
            assert time.whole[row, column] == one.end - one.start
            assert time.waiting[row, column] == one.seconds.get("wait", {}).get("waiting", 0.0)
            assert time.seconds["call", "actor.generate"][row, column] == one.seconds["call"]["actor.generate"]


def test_a_resumed_run_leaves_out_the_iterations_that_it_repeats() -> None:
    rng = np.random.default_rng(0)
    first, second = ([an_iteration(step, rng) for step in steps] for steps in (range(1, 9), range(6, 12)))
    builder = RankTimeBuilder()
    builder.update(a_record({0: first}))
    resumed = a_record({0: first[:5]}, {0: second})

    assert_same(builder.update(resumed), RankTimeBuilder().update(resumed))


def test_another_run_in_the_same_folder_begins_anew() -> None:
    rng = np.random.default_rng(0)
    before, after = ([an_iteration(step, rng) for step in range(1, 9)] for _ in range(2))
    builder = RankTimeBuilder()
    builder.update(a_record({0: before, 1: before}))

    assert_same(builder.update(a_record({0: after})), RankTimeBuilder().update(a_record({0: after})))


def test_later_iterations_leave_earlier_arrays_alone() -> None:
    rng = np.random.default_rng(0)
    made = [an_iteration(step, rng) for step in range(1, 9)]
    builder = RankTimeBuilder()
    earlier = builder.update(a_record({0: made, 1: made[:3]}))

    builder.update(a_record({0: made, 1: made}))

    assert_same(earlier, RankTimeBuilder().update(a_record({0: made, 1: made[:3]})))


def test_an_iteration_that_cannot_be_added_spoils_no_later_one() -> None:
    rng = np.random.default_rng(0)
    broken = IterationRecord(step=2, start=0.0, end=1.0, seconds={}, peak_bytes={"actor.train": 10**400})
    made = [an_iteration(1, rng), broken]
    builder = RankTimeBuilder()
    with pytest.raises((OverflowError, TypeError)):
        builder.update(a_record({0: made}))

    repaired = a_record({0: [*made[:1], an_iteration(2, rng)]})

    assert_same(builder.update(repaired), RankTimeBuilder().update(repaired))


def test_an_update_adds_only_the_lines_that_a_run_has_written_since(tmp_path: Path) -> None:
    write_session(tmp_path, started(), steps=5)
    reader, builder = RunReader(tmp_path), RankTimeBuilder()
    builder.update(reader.read())
    for path in tmp_path.glob("rank_*.jsonl"):
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join([*lines, lines[-1].replace('"step":5', '"step":6').replace('"step": 5', '"step": 6')]))

    grown = builder.update(reader.read())

    assert grown.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert_same(grown, RankTimeBuilder().update(RunReader(tmp_path).read()))
