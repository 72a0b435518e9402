from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.strategies import runs
from tests.strategies.checkpoint_runs import Part, contents, differences, run_parts
from tests.workers import WorkerPool

GRPO_PLAN = runs.calls(actor_generate="tp2", reference_infer="dp2", actor_train="fsdp2")


def _sft(layout: str) -> dict[str, Any]:
    return runs.calls(actor_train=layout)


# ---- the same trajectory
@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_resumed_run_is_the_straight_run_bit_by_bit(workers: WorkerPool, tmp_path: Path, algorithm: str) -> None:
    plan = GRPO_PLAN if algorithm == "grpo" else _sft("fsdp2")
    straight = Part(plan, 5, save=tmp_path / "straight", save_at=(2,), algorithm=algorithm)
    resumed = replace(straight, resume=tmp_path / "straight-2", save=tmp_path / "resumed", save_at=(), seed=99)

    logged = workers.run(run_parts, [straight, resumed], 2, world_size=2, init_process_group=False)[0]

    assert logged[1] == logged[0][2:]  # three steps, the last two of them in the next epoch
    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}


def test_saving_changes_nothing(workers: WorkerPool, tmp_path: Path) -> None:
    # Upstream steps an optimizer that has no state yet in order to save it, which moves weights under Adam.
    saving = Part(_sft("fsdp2"), 3, save=tmp_path / "saving", save_at=(1, 2))
    silent = replace(saving, save=tmp_path / "silent", save_at=())

    logged = workers.run(run_parts, [saving, silent], 2, world_size=2, init_process_group=False)[0]

    assert logged[0] == logged[1]
    assert differences(contents(tmp_path / "saving"), contents(tmp_path / "silent")) == {}


def test_dropout_goes_on_where_it_was(workers: WorkerPool, tmp_path: Path) -> None:
    straight = Part(_sft("fsdp2"), 3, save=tmp_path / "straight", save_at=(2,), family="gpt2", dropout=0.3)
    resumed = replace(straight, resume=tmp_path / "straight-2", save=tmp_path / "resumed", save_at=(), seed=99)
    other = replace(straight, save=tmp_path / "other", save_at=(), seed=99)

    logged = workers.run(run_parts, [straight, resumed, other], 2, world_size=2, init_process_group=False)[0]

    assert logged[1] == logged[0][2:]
    assert differences(contents(tmp_path / "resumed"), contents(tmp_path / "straight")) == {}
    assert logged[2] != logged[0], "without dropout this test would show nothing"


# ---- into other layouts and other numbers of ranks
def test_a_run_goes_through_four_layouts_as_through_one(workers: WorkerPool, tmp_path: Path) -> None:
    straight = Part(_sft("fsdp4"), 5, save=tmp_path / "straight")
    layouts = ("fsdp4", "tp4", "fsdp2.tp2", "dp2.tp2", "fsdp2.tp2@3,2,1,0")
    parts = [
        Part(_sft(layout), step + 1, resume=tmp_path / str(step) if step else None, save=tmp_path / str(step + 1))
        for step, layout in enumerate(layouts)
    ]

    logged = workers.run(run_parts, [straight, *parts], 4, init_process_group=False, deadline_s=120)[0]

    _close(logged[0], [entry for part in logged[1:] for entry in part])
    _close_contents(tmp_path / "5", tmp_path / "straight")


def test_a_run_goes_over_four_two_and_one_ranks_and_back(workers: WorkerPool, tmp_path: Path) -> None:
    straight = Part(_sft("fsdp4"), 4, save=tmp_path / "straight")
    logged = workers.run(run_parts, [straight], 4, init_process_group=False)[0]
    after: list[dict[str, float]] = []
    for step, (layout, world_size) in enumerate([("fsdp4", 4), ("tp2", 2), ("dp1", 1), ("fsdp2.tp2", 4)]):
        before = tmp_path / str(step) if step else None
        part = Part(_sft(layout), step + 1, resume=before, save=tmp_path / str(step + 1))
        after += workers.run(run_parts, [part], world_size, world_size=world_size, init_process_group=False)[0][0]

    _close(logged[0], after)
    _close_contents(tmp_path / "4", tmp_path / "straight")


def _close(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert other == pytest.approx(one, abs=1e-6, rel=1e-6)


def _close_contents(ours: Path, theirs: Path) -> None:
    apart = {name: size for name, size in differences(contents(ours), contents(theirs)).items() if size > 1e-6}
    assert apart == {}
