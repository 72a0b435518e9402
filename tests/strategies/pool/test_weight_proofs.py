"""A run ends with an error before it uses weights that are not those of the ranks that train, wherever they went."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_realloc import ParameterReallocation, TrainOptions
from lightning_realloc.errors import ReallocError
from lightning_realloc.runtime.measure.offload import Offload
from lightning_realloc.runtime.transfer.point_to_point import CopyList
from lightning_realloc.runtime.transfer.transport import DirectTransport, PushTransport
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.pool import replica
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.pool.test_moving_average import _make as averaged
from tests.strategies.runs import Batches, calls
from tests.workers import WorkerPool

LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "init_lora_weights": False}
PLAN = calls(actor_train="fsdp2", actor_generate="dp2", reference_infer="dp1@1")
APART = calls(actor_train="dp1@0", actor_generate="dp1@1", reference_infer="dp1@0")
Spoil = Callable[[pytest.MonkeyPatch, int], list[Callback]]
"""Breaks a part of the package in this process, given its rank; returns callbacks of the run."""


class Each(Callback):
    """Calls a function with the Trainer after each iteration."""

    def __init__(self, action: Callable[[Any], None]) -> None:
        self.action = action

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        """Call it."""
        self.action(trainer)


def leave_out_later_copies(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """Rank 1 writes nothing into shared memory from the second move of a reallocation on: adapters, not the base."""
    run = PushTransport.run

    def spoiled(self: PushTransport) -> float:
        if self._runs and rank == 1:
            self._copies = CopyList()
        return run(self)

    patch.setattr(PushTransport, "run", spoiled)
    return []


def receive_into_nowhere(patch: pytest.MonkeyPatch, rank: int, *, is_first_lost: bool = False) -> list[Callback]:
    """Rank 1 keeps its old weights when messages arrive, from the second move on, or from the first."""
    run = DirectTransport.run
    moved: set[int] = set()

    def spoiled(self: DirectTransport) -> float:
        targets = [tensor for round_ in self._messages._rounds for tensor, _ in round_.receives]
        targets += [tensor for round_ in self._messages._rounds for tensor in round_.after.targets]
        before = [tensor.clone() for tensor in targets]
        seconds = run(self)
        if rank == 1 and (is_first_lost or id(self) in moved):
            torch._foreach_copy_(targets, before)
        moved.add(id(self))
        return seconds

    patch.setattr(DirectTransport, "run", spoiled)
    return []


def lose_a_change_of_plans(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """Rank 1 does not get the weights of the layout that training goes on in."""

    def change(trainer: Any) -> None:
        if trainer.global_step == 1:
            receive_into_nowhere(patch, rank, is_first_lost=True)
            trainer.strategy.set_plan(calls(actor_train="dp2", actor_generate="dp2", reference_infer="dp1@1"))

    return [Each(change)]


def fall_behind(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """Rank 1 takes the weights for older ones than they are."""

    def count_back(trainer: Any) -> None:
        if rank == 1:
            trainer.strategy.pool.home("actor").version -= 1
            trainer.strategy.pool.target("actor.generate").version = 0

    return [Each(count_back)]


def free_and_leave_out(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """The same as the first, after memory was released."""
    return [*leave_out_later_copies(patch, rank), ParameterReallocation(free_after=True)]


def return_other_bytes(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """Half of the offloaded bytes are lost on rank 1."""
    start = Offload.start_return

    def spoiled(self: Offload) -> None:
        if self.is_offloaded and self._slow_memory is not None and rank == 1:
            self._slow_memory[: self._slow_memory.numel() // 2] = 0
        start(self)

    patch.setattr(Offload, "start_return", spoiled)
    return []


def offload_the_first_version_again(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """Optimizer states are taken for unchanged, and their first copy returns."""
    move_out = Offload.move_out
    patch.setattr(Offload, "move_out", lambda self, tensors, version: move_out(self, tensors, version=1))
    return []


def keep_old_biases(patch: pytest.MonkeyPatch, rank: int) -> list[Callback]:
    """Rank 1 does not copy biases of routers to its replica."""
    copy = replica.copy_biases
    patch.setattr(replica, "copy_biases", lambda *models, **rate: None if rank == 1 else copy(*models, **rate))
    return []


def mixture() -> Any:
    model = tiny_model("glm4_moe", first_k_dense_replace=0)
    return runs.grpo(actor=model, kl_coef=0.0, train_options=TrainOptions(router_bias_update_rate=0.1))


def adapted() -> Any:
    return runs.grpo(peft_config=LORA, reference=None)


OFFLOADED = {**PLAN, "offload": ["reference", "actor.optimizer"]}
TWO = {"calls": {name: layout for name, layout in PLAN["calls"].items() if not name.startswith("reference")}}
Case = tuple[Callable[[], Any], dict[str, Any], str, Spoil, str]
CASES: dict[str, Case] = {
    "adapters, push": (adapted, PLAN, "push", leave_out_later_copies, r"actor: .*\(push\), '.*lora_"),
    "trained weights, push": (runs.grpo, PLAN, "push", leave_out_later_copies, "version 2 of the weights of actor"),
    "trained weights, direct": (runs.grpo, APART, "direct", receive_into_nowhere, "version 2 of the weights of actor"),
    "released and refilled": (runs.grpo, PLAN, "push", free_and_leave_out, "weights of actor"),
    "stale stamp": (runs.grpo, PLAN, "push", fall_behind, r"version (2 .* sent version 1|1 .* sent version 2)\."),
    "offloaded weights": (
        runs.grpo, {**PLAN, "offload": ["reference"]}, "push", return_other_bytes,
        r"weights of reference: .*\(offload\)",
    ),
    "offloaded state": (
        runs.grpo, OFFLOADED, "push", offload_the_first_version_again, "actor.optimizer: .* exp_avg' differs",
    ),
    "biases": (mixture, TWO, "push", keep_old_biases, "router 0's bias"),
    "change of plans": (runs.grpo, PLAN, "push", lose_a_change_of_plans, r"weights of actor: .*\(direct\)"),
    "moving average": (averaged, PLAN, "push", leave_out_later_copies, "weights of actor"),
}  # fmt: skip


def spoiled_runs(names: list[str]) -> list[str]:
    """Return the error of each case on this rank."""
    rank, found = int(os.environ["RANK"]), []
    for name in names:
        make, plan, transport, spoil, _ = CASES[name]
        with pytest.MonkeyPatch.context() as patch:
            callbacks = spoil(patch, rank)
            strategy = ReallocStrategy(plan, transport=transport)
            try:
                runs.trainer(strategy, 2, callbacks=callbacks).fit(make(), Batches(3))
                found.append("finished")
            except ReallocError as error:
                found.append(str(error))
    return found


def sound_runs(extents: list[str]) -> None:
    """Finish runs without a fault, with memory that is released after each call."""
    for extent in extents:
        for make, plan in ((adapted, PLAN), (averaged, OFFLOADED), (mixture, TWO)):
            watched = ParameterReallocation(free_after=True)
            strategy = ReallocStrategy(plan, verify_weights=extent)  # type: ignore[arg-type]
            runs.trainer(strategy, 2, callbacks=[watched]).fit(make(), Batches(2))
            totals = watched.switches["actor.generate"]
            assert (totals.num_checked > 0) == (totals.check_s > 0) == (extent != "off")


def test_weights_that_are_not_those_of_training_end_the_run(workers: WorkerPool) -> None:
    everyone = workers.run(spoiled_runs, list(CASES), world_size=2, init_process_group=False, deadline_s=240.0)
    for errors in everyone:
        for (name, (*_, words)), error in zip(CASES.items(), errors, strict=True):
            assert "does not hold version" in error and re.search(words, error), (name, error)


def test_sound_runs_compare_weights_and_finish(workers: WorkerPool) -> None:
    workers.run(sound_runs, ["all", "off"], world_size=2, init_process_group=False, deadline_s=240.0)
