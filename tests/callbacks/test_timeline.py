"""Timeline's record of real runs: complete, the same calls and metrics as the run, and continued after a resume."""

from __future__ import annotations

import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_realloc.algorithms.rollout.accuracy import Accuracy
from lightning_realloc.callbacks import Timeline
from lightning_realloc.errors import ConfigError
from lightning_realloc.recording.events import PlanInstalled, PlanPredicted, RunEnded, Validated
from lightning_realloc.recording.reader import Session, read_run
from lightning_realloc.report.runs.run_folder import read_run_folder
from tests.strategies import runs
from tests.workers import WorkerPool

APART = runs.calls(actor_train="fsdp2@0-1", actor_generate="dp2@0-1", reference_infer="dp1@1")


def record(
    folder: str, options: dict[str, Any], algorithm: str = "grpo", *, iterations: int = 4
) -> list[dict[str, float]]:
    """Train with a record; return this rank's seconds of calls so far after each iteration, by its runner."""
    module = getattr(runs, algorithm)()
    strategy = runs.ReallocStrategy(**options)
    trainer = runs.trainer(
        strategy, runs.world_size(), callbacks=[Timeline(folder)], max_steps=iterations, max_epochs=-1
    )
    seconds: list[dict[str, float]] = []
    module.on_train_batch_end = lambda *_: seconds.append(dict(strategy.runner.seconds))
    trainer.fit(module, runs.Batches(2))
    return seconds


def record_with_a_skewed_clock(folder: str, options: dict[str, Any], algorithm: str) -> list[dict[str, float]]:
    """Record a run, whose second rank has a clock that is an hour ahead; return what `record` does."""
    right = time.time
    if int(os.environ["RANK"]) == 1:
        time.time = lambda: right() + 3600.0
    try:
        return record(folder, options, algorithm)
    finally:
        time.time = right


def check_one_clock(session: Session, began: float) -> None:
    """Check that hosts with different clocks have one time in the record of four iterations."""
    assert began <= session.started.unix_s < began + 120.0
    assert all([one.step for one in iterations] == [1, 2, 3, 4] for iterations in session.ranks.values())
    for iterations in session.ranks.values():
        for ours, theirs in zip(session.ranks[0], iterations, strict=True):
            assert ours.end == pytest.approx(theirs.end, abs=1.0), "all count seconds from the same moment"


def check_times(session: Session, seconds: dict[int, list[dict[str, float]]]) -> None:
    """Check that pieces have no gaps, and that calls with their moves take what the runner measured without waiting.

    A busy machine may interrupt between the two clocks, so the median over iterations is compared.
    """
    for rank, iterations in session.ranks.items():
        for before, after in zip([None, *iterations], iterations, strict=False):
            assert before is None or after.start == before.end
            assert after.pieces is not None, "a short run keeps all pieces"
            assert sum(piece.seconds for piece in after.pieces) == pytest.approx(after.end - after.start, abs=1e-4)
        gaps: dict[str, list[float]] = {}
        for one, before, after in zip(iterations, [{}, *seconds[rank]], seconds[rank], strict=False):
            recorded: dict[str, float] = {}
            for name, spent in (one.seconds.get("call", {}) | one.seconds.get("move", {})).items():
                call = name.removeprefix("-> ")
                recorded[call] = recorded.get(call, 0.0) + spent
            for call, until in after.items():
                spent = until - before.get(call, 0.0)
                gaps.setdefault(call, []).append(abs(recorded.get(call, 0.0) - spent) - 0.1 * spent)
        for call, each in gaps.items():
            assert len(each) == len(iterations) and statistics.median(each) < 0.02, (rank, call, each)


@pytest.mark.parametrize(
    ("world_size", "options", "algorithm"),
    [
        (1, {}, "grpo"),
        pytest.param(2, {"plan": APART}, "grpo", marks=pytest.mark.exhaustive),
        (2, {"overlap": "none", "plan": {"calls": APART["calls"], "offload": ["reference"]}}, "grpo"),
    ],
)
def test_the_record_has_what_every_rank_did(
    workers: WorkerPool, tmp_path: Path, world_size: int, options: dict[str, Any], algorithm: str
) -> None:
    began = time.time()
    seconds = workers.run(
        record_with_a_skewed_clock, str(tmp_path), options, algorithm, world_size=world_size, init_process_group=False
    )
    session = read_run(tmp_path).last
    assert sorted(session.ranks) == list(range(world_size))
    check_one_clock(session, began)
    check_times(session, dict(enumerate(seconds)))
    assert [row.step for row in session.metrics] == [1, 2, 3, 4]
    assert all("reward" in row.values and "actor/loss" in row.values for row in session.metrics)
    kinds = [type(event) for event in session.events]
    assert kinds == [PlanInstalled, PlanPredicted, RunEnded]
    predicted = session.events[1]
    assert isinstance(predicted, PlanPredicted)
    calls = {entry.phase for entry in predicted.entries}
    assert calls >= {"actor.generate", "reference.infer", "actor.train"}
    for made in session.ranks.values():
        assert not any(one.waiting or "environment" in one.seconds for one in made), "no environment, no waiting for it"
        assert set(made[-1].peak_bytes) == {"actor.generate", "reference.infer", "actor.train"}
        assert min(made[-1].peak_bytes.values()) > 50 << 20  # the process itself
    if world_size == 2:
        assert all("actor.generate" in one.moves for made in session.ranks.values() for one in made)
        assert any("offload" in one.seconds for one in session.ranks[1]) == ("overlap" in options)
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in trace if event["ph"] == "X"} == set(range(world_size))


def test_a_later_fit_continues_the_record(tmp_path: Path) -> None:
    module = runs.grpo(accuracy=Accuracy(threshold=0.5))
    for steps in (2, 5):
        trainer = runs.trainer(
            runs.ReallocStrategy(), 1, callbacks=[Timeline(tmp_path)], max_steps=steps, max_epochs=-1
        )
        path = tmp_path / "saved"
        validated = [] if path.exists() else runs.Batches(1)
        trainer.fit(module, runs.Batches(2), validated, ckpt_path=path if path.exists() else None)
        trainer.save_checkpoint(path)
        if steps == 2:
            scored = module.question_scores["val"]
            module = runs.grpo(accuracy=Accuracy(threshold=0.5))
    first, second = read_run(tmp_path).sessions
    rows = (*first.metrics, *second.metrics)
    assert [row.step for row in rows if "reward" in row.values] == [1, 2, 3, 4, 5]
    assert second.started.step == 2 and second.started.max_steps == 5
    (validated,) = (event for event in (*first.events, *second.events) if isinstance(event, Validated))
    assert validated.step == 2 and validated.seconds > 0
    trainer.test(module, runs.Batches(1, size=4), verbose=False)
    alone = runs.trainer("realloc", 1, callbacks=[Timeline(tmp_path / "alone")])
    alone.validate(module, runs.Batches(1), verbose=False)
    run = read_run_folder(tmp_path)
    assert {name: (one.step, len(one.scores.questions)) for name, one in run.evaluations.items()} == {
        "val": (2, 6), "test": (5, 4)
    }  # fmt: skip
    assert run.evaluations["val"].scores == scored and run.problems == ()
    assert read_run_folder(tmp_path / "alone").evaluations["val"].scores == module.question_scores["val"]


def test_an_error_that_ends_the_run_is_recorded(tmp_path: Path) -> None:
    module = runs.grpo()

    def fail(samples: object) -> None:
        raise ValueError("a broken reward")

    module.summarize = fail
    trainer = runs.trainer(runs.ReallocStrategy(), 1, callbacks=[Timeline(tmp_path)], max_steps=2, max_epochs=-1)
    with pytest.raises(ValueError, match="a broken reward"):
        trainer.fit(module, runs.Batches(2))
    ended = read_run(tmp_path).last.events[-1]
    assert isinstance(ended, RunEnded) and ended.error == "ValueError: a broken reward"


def test_a_folder_that_cannot_be_written_is_refused_before_training() -> None:
    trainer = runs.trainer(runs.ReallocStrategy(), 1, callbacks=[Timeline("/proc/record")], max_steps=1)
    with pytest.raises(
        ConfigError, match=r"Timeline's folder: /proc/record cannot be written: .*; give another folder"
    ):
        trainer.fit(runs.grpo(), runs.Batches(1))


def test_a_full_disk_ends_the_record_and_not_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    trainer = runs.trainer(runs.ReallocStrategy(), 1, callbacks=[Timeline(tmp_path)], max_steps=3, max_epochs=-1)
    trainer.fit(runs.grpo(), runs.Batches(2))
    assert trainer.global_step == 3
    assert [one.step for one in read_run(tmp_path).last.ranks[0]] == [1, 2, 3]
    warnings = [one.getMessage() for one in caplog.records if "this part of the record ends here" in one.getMessage()]
    assert len(warnings) == 1 and "metrics.jsonl cannot be written (No space left on device)" in warnings[0]


def test_a_module_without_calls_is_refused(tmp_path: Path) -> None:
    trainer = runs.trainer(runs.ReallocStrategy(), 1, callbacks=[Timeline(tmp_path)], max_steps=1)
    with pytest.raises(ConfigError, match="Timeline records the calls of this package's algorithms"):
        trainer.fit(BoringModel())
