"""The progress bar shows what an iteration does, on rank 0 and where it can be drawn, and is left as it was."""

from __future__ import annotations

import io
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import Callback, RichProgressBar, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn

from lightning_realloc.callbacks.progress.call_progress import ActivityText, CallProgress, _Painter
from lightning_realloc.generation import SamplingParams
from lightning_realloc.runtime.messages.flight_record import ActivityProgress, FlightRecord
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerPool


# ---- the text
class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.offset = 0.0

    def __call__(self) -> float:
        """Return the seconds of `time.monotonic`, and those that were added."""
        return time.monotonic() + self.offset


def test_a_call_shows_finished_samples_speed_and_the_longest_running_response() -> None:
    record, clock = FlightRecord(), Clock()
    text, progress = ActivityText(record, clock), [ActivityProgress(0, 64, "samples", 100, 10)]
    assert text() == ""
    with record.during("actor.generate", kind="call"):
        with record.during("moving weights for actor.generate", kind="wait"):
            assert text() == "actor.generate: moving weights"
        record.follow(lambda: progress[0])
        assert text() == "actor.generate 0/64 samples, longest 10"
        clock.offset, progress[0] = 1000.0, ActivityProgress(34, 64, "samples", 800_100, 187)
        assert text() == "actor.generate 34/64 samples, 800 tok/s, longest 187"
        progress[0] = ActivityProgress(64, 64, "samples", 800_100, None)
        assert text() == "actor.generate 64/64 samples, 800 tok/s"
    assert text() == ""


def test_other_activities_show_parts_or_their_duration() -> None:
    record, clock = FlightRecord(), Clock()
    text = ActivityText(record, clock)
    with record.during("save_checkpoint", kind="save"):
        assert text() == "save_checkpoint"
        clock.offset = 12.2
        assert text() == "save_checkpoint 12 s"
    clock.offset = 0.0
    with record.during("actor.train", kind="call"):
        record.expect_parts(2, "micro-batches")
        record.advance()
        assert text() == "actor.train 1/2 micro-batches"
        with record.during("waiting for data of rank 1", waits_for=(1,)):
            assert text() == "actor.train 1/2 micro-batches: waiting for data of rank 1"
    with record.during("critic.infer", kind="call"):
        record.expect_parts(None, "micro-batches")
        assert text() == "critic.infer 0 micro-batches"
    with record.during("waiting for all ranks", waits_for=(1,)):
        assert text() == "waiting for all ranks"


@given(st.lists(st.integers(0, 9), min_size=1))
def test_counts_of_a_call_never_decrease_and_the_next_call_starts_anew(counts: Sequence[int]) -> None:
    record = FlightRecord()
    text = ActivityText(record)
    for _ in range(2):
        shown = []
        with record.during("actor.generate", kind="call"):
            for count in counts:
                record.follow(lambda count=count: ActivityProgress(count, 9, "samples"))
                shown.append(int(text().split()[1].partition("/")[0]))
        assert shown[0] == counts[0] and shown[-1] == max(counts)
        assert all(before <= after for before, after in pairwise(shown))


# ---- real bars
class Terminal(io.StringIO):
    """Keeps what is drawn."""

    def isatty(self) -> bool:
        """Return True, as a terminal does."""
        return True


class OwnBar(TQDMProgressBar):
    """A user's bar, with other metrics."""

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        """Return one metric."""
        return {"own": "metric"}


class Watcher(Callback):
    """Records whether the display's thread runs, and fails in an iteration if that is asked for."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.ran = False

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Record the thread; fail in the second iteration."""
        self.ran = self.ran or is_running()
        if self.fails and trainer.global_step == 2:
            raise KeyError("on purpose")


def is_running() -> bool:
    """Return whether the thread that draws runs."""
    return any(thread.name == "progress" for thread in threading.enumerate())


def slow_reward(completion_ids: Sequence[Sequence[int]], **columns: object) -> list[float]:
    """Take long enough for some updates."""
    time.sleep(0.15)
    return runs.low_tokens(completion_ids)


@contextmanager
def output(stream: io.StringIO) -> Iterator[io.StringIO]:
    """Replace standard output."""
    before, sys.stdout = sys.stdout, stream
    try:
        yield stream
    finally:
        sys.stdout = before


def fit(stream: io.StringIO, world_size: int, *bars: Callback, fails: bool = False, **options: Any) -> dict[str, Any]:
    """Return what a run of two iterations drew, and the state that it left."""
    watcher = Watcher(fails)
    module = runs.grpo(reward=slow_reward, sampling=SamplingParams(n=4, max_new_tokens=12, ignore_eos=True))
    with output(stream), suppress(KeyError):
        trainer = runs.trainer(
            "realloc", world_size, max_steps=2, callbacks=[*bars, watcher, CallProgress(0.01)],
            **{"enable_progress_bar": True, **options},
        )  # fmt: skip
        trainer.fit(module, Batches(2, size=3 * world_size), Batches(1, size=2))
    bar: Any = trainer.progress_bar_callback
    drawn = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    return {
        "drawn": drawn.replace("\r", "\n").splitlines(),
        "ran": watcher.ran,
        "runs": is_running(),
        "changed": isinstance(bar, TQDMProgressBar) and "format_meter" in vars(bar.train_progress_bar),
        "columns": [type(one).__name__ for one in getattr(getattr(bar, "progress", None), "columns", [])],
    }


def rich_bar() -> RichProgressBar:
    """Return a bar that is drawn wherever its output goes."""
    return RichProgressBar(console_kwargs={"force_terminal": True, "width": 200})


def displays_of_failures() -> Mapping[str, dict[str, Any]]:
    """Return the results of runs that fail, and of runs without a bar."""
    size = runs.world_size()
    return {
        "own": fit(Terminal(), size, OwnBar(), fails=True),
        "failing rich": fit(Terminal(), size, rich_bar(), fails=True),
        "file": fit(io.StringIO(), size),
        "off": fit(Terminal(), size, enable_progress_bar=False),
    }


def displays() -> Mapping[str, dict[str, Any]]:
    """Return the results of runs with both bars of Lightning."""
    size = runs.world_size()
    found = {"tqdm": fit(Terminal(), size, TQDMProgressBar()), "rich": fit(Terminal(), size, rich_bar())}
    with output(Terminal()) as stream:
        trainer = runs.trainer("realloc", size, enable_progress_bar=True, callbacks=[CallProgress(0.01)])
        trainer.validate(runs.grpo(reward=slow_reward), Batches(2), verbose=False)
    drawn = stream.getvalue().replace("\r", "\n").splitlines()
    return {**found, "validate": {"drawn": drawn, "runs": is_running(), "ran": False}}


@pytest.mark.exhaustive  # the painter alone: below
def test_bars_show_the_calls_on_rank_0_and_are_left_as_they_were(workers: WorkerPool) -> None:
    both, second = workers.run(displays, world_size=2, init_process_group=False)
    (alone,) = workers.run(displays_of_failures, world_size=1, init_process_group=False)
    first = {**both, **alone}
    assert not any(one["ran"] or any(".generate" in line for line in one["drawn"]) for one in second.values())
    assert not any(one["runs"] for one in [*first.values(), *second.values()])
    for name in ("tqdm", "own", "rich", "failing rich"):
        drawn, left = first[name]["drawn"], first[name]
        assert left["ran"] and not left["changed"] and "_TextAndMetrics" not in left["columns"], name
        pattern = re.compile(r"actor\.generate (\d+)/12 samples")
        counts = [int(found[1]) for line in drawn if (found := pattern.search(line))]
        assert counts and all(0 <= count <= 12 for count in counts), name
        assert any("judge" in line for line in drawn), name
    for name in ("tqdm", "own"):
        after = [line for line in first[name]["drawn"] if "2/2" in line and "actor" not in line]
        assert after or name == "own", "the finished bar shows metrics only"
    assert any(re.search(r"judge, own=metric", line) for line in first["own"]["drawn"]), "metrics follow the call"
    assert any("judge reward: " in line for line in first["rich"]["drawn"]), "metrics follow the call"
    for name in ("file", "off"):
        assert not first[name]["ran"] and not any("judge" in line for line in first[name]["drawn"]), name
    assert any("actor.generate" in line for line in first["validate"]["drawn"])


def test_the_end_of_a_run_does_not_wait_for_a_bar_whose_lock_is_kept() -> None:
    bar = Tqdm(total=2, file=Terminal())
    trainer: Any = SimpleNamespace(
        progress_bar_callback=TQDMProgressBar(), state=SimpleNamespace(fn=TrainerFn.FITTING), sanity_checking=False
    )
    trainer.progress_bar_callback.train_progress_bar = bar
    texts = iter("abcdefghijklmnopqrstuvwxyz" * 100)
    painter = _Painter(trainer, lambda: next(texts), 0.01)
    begin = time.monotonic()
    with bar.get_lock():  # as after Ctrl-C within tqdm
        painter.start()
        time.sleep(0.1)
        painter.stop()
        assert time.monotonic() - begin < 30 and painter.is_alive()
        assert "format_meter" not in vars(bar)
    painter.join()
