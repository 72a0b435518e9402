"""Callbacks measure the links between nodes again when iterations become slower, warn, and plan with what they find."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback

from lightning_realloc import AutoTuner
from lightning_realloc.callbacks import Timeline
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.runtime.measure.link_table import Link, LinkTable
from lightning_realloc.runtime.measure.link_watch import LinkWatch
from lightning_realloc.runtime.measure.links import measure_pairs
from lightning_realloc.tuning import tuner
from tests.strategies import runs
from tests.workers import WorkerPool

AS_BEFORE = "iterations became slower, but links are as at the start"


class Found(NamedTuple):
    """What a run over two nodes found about its link."""

    lines: list[str]
    """Logged lines about links that were measured again."""
    start: Link
    now: ClusterSpec
    """The cluster of later plans."""


class Stop(Callback):
    """Ends a run once a tuning has ended that followed another one."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Look at the tuner, if there is one."""
        trainer.should_stop |= any(
            isinstance(one, AutoTuner) and one.tuner.num_tunings > 1 for one in trainer.callbacks
        )


def train_over_two_nodes(callback: Callback, later_rate: float, *, steps: int) -> Found:
    """Train as two nodes whose links later have this share of their bandwidth at the start."""
    lines: list[str] = []
    strategy = runs.ReallocStrategy()

    def measure(device: Any, hosts: tuple[str, ...], per_node: int) -> LinkTable:
        found = measure_pairs(device, hosts, per_node)
        if strategy.links is None:
            return found
        before = strategy.links.start
        assert found.links.keys() == before.links.keys()
        changed = {ends: Link(later_rate * link.bytes_per_s, 1e-4) for ends, link in before.links.items()}
        return LinkTable(tuple(hosts), changed)

    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "NODE_RANK": os.environ["RANK"]}.items():
            patch.setenv(name, value)
        for name in ("rank_zero_warn", "rank_zero_info"):
            patch.setattr(f"lightning_realloc.callbacks.run_view.{name}", lines.append)
        patch.setattr("lightning_realloc.runtime.measure.links.measure_pairs", measure)
        patch.setattr(LinkWatch, "record", lambda watch, metrics: any("seconds/" in name for name in metrics))
        patch.setattr("lightning_realloc.runtime.measure.links.PAIRS_S", 0.2)
        for name in ("WINDOW_ITERATIONS", "COOLDOWN_ITERATIONS"):
            patch.setattr(tuner, name, 1)
        trainer = runs.trainer(strategy, 1, num_nodes=2, callbacks=[callback, Stop()], max_steps=steps, max_epochs=-1)
        trainer.fit(runs.grpo(), runs.Batches(2))
    assert strategy.links is not None
    return Found(lines, strategy.links.start.usual, strategy.cluster)


def with_a_record(folder: str, later_rate: float) -> Found:
    """Train with a `Timeline` that finds each iteration slow."""
    return train_over_two_nodes(Timeline(folder, predict=False, image_every_n_steps=None), later_rate, steps=3)


def with_tuning(later_rate: float) -> Found:
    """Train with an `AutoTuner` that starts again at any change of speed."""
    again = AutoTuner(
        max_trials=1, max_overhead=1.0, search_seconds=0.1, profile_seconds=0.1, drift_threshold=1e-9,
        profile_cache=None, save_to=None,
    )  # fmt: skip
    return train_over_two_nodes(again, later_rate, steps=1000)


@pytest.mark.parametrize("later_rate", [0.1, pytest.param(0.9, marks=pytest.mark.exhaustive)])
def test_a_record_warns_of_slow_links_once(workers: WorkerPool, tmp_path: Any, later_rate: float) -> None:
    for found in workers.run(with_a_record, str(tmp_path), later_rate, world_size=2, init_process_group=False):
        assert found.now.inter_node_bytes_per_s == pytest.approx(later_rate * found.start.bytes_per_s)
        if later_rate < 0.5:
            (line,) = found.lines
            assert line.startswith("the link between ") and "has become slow since the start" in line
        else:
            assert len(found.lines) > 1 and all(line.startswith(AS_BEFORE) for line in found.lines)


def test_a_second_tuning_plans_with_the_links_of_its_time(workers: WorkerPool) -> None:
    for found in workers.run(with_tuning, 0.1, world_size=2, init_process_group=False):
        assert found.lines and "has become slow since the start" in found.lines[0]
        assert found.now.inter_node_bytes_per_s == pytest.approx(0.1 * found.start.bytes_per_s)
