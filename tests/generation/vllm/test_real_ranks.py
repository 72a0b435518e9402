"""vLLM itself in runs: tensor-parallel ranks that share one, adapters alone, and ends of its processes."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_realloc import GenerationOptions
from lightning_realloc.errors import WeightMismatch
from lightning_realloc.generation import SamplingParams, VLLMOptions
from lightning_realloc.generation.vllm.hand_over import SharedMemoryHandOver
from tests.generation.vllm.test_vllm_engine import is_running
from tests.models import tiny_model
from tests.strategies import runs
from tests.strategies.runs import Batches, Outcome
from tests.vllm_environment import vllm_python
from tests.workers import WorkerFailure, WorkerPool

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1800)]
NUM_UPDATES = 20
LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}


def vllm_processes() -> dict[int, bool]:
    """Return process -> whether it is a worker, for the processes of vLLMs that ranks of this machine started."""
    commands, parents = dict[int, str](), dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            commands[int(folder.name)] = (folder / "cmdline").read_text(errors="replace")
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    children = {process for process, command in commands.items() if "generation/vllm/child.py" in command}
    workers = {process for process, parent in parents.items() if parent in children}
    workers = {process for process in workers if "resource_tracker" not in commands[process]}
    return dict.fromkeys(children, False) | dict.fromkeys(workers, True)


def left_in_shared_memory() -> set[str]:
    """Return the names of shared memory in which Python's processes, and vLLM's workers, exchange messages."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "vllm_dist_"))}


def wait_until(is_true: Callable[[], bool], *, most_s: float) -> bool:
    """Return whether a condition comes true in time."""
    end = time.monotonic() + most_s
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(0.2)
    return True


class Killer(Callback):
    """Ends processes after an iteration; ``victim`` is "worker" for one of vLLM's, or "rank" for this process."""

    def __init__(self, victim: str, iteration: int) -> None:
        self.victim, self.iteration = victim, iteration

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Kill, on the last rank."""
        if trainer.global_step != self.iteration or trainer.global_rank != trainer.world_size - 1:
            return
        if self.victim == "rank":
            os.kill(os.getpid(), signal.SIGKILL)
        workers = [process for process, is_worker in vllm_processes().items() if is_worker]
        os.kill(workers[-1], signal.SIGKILL)


class Spoiler(Callback):
    """From the second iteration on, the last rank leaves the weights whose name has some text out of shared memory."""

    def __init__(self, part: str) -> None:
        self.part = part

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        """Begin, on the last rank that hands weights over."""
        write = SharedMemoryHandOver._write

        def spoiled(hand_over: Any, segment: Any, chunk: Any, weights: Any) -> None:
            write(hand_over, segment, [slot for slot in chunk if self.part not in slot.name], weights)

        if trainer.global_rank == trainer.strategy.plan.layout("actor.generate").ranks[-1]:  # type: ignore[attr-defined]
            SharedMemoryHandOver._write = spoiled  # type: ignore[method-assign]


def train(
    layout: str, num_updates: int, settings: Mapping[str, Any], victim: str | None = None, unwritten: str | None = None
) -> Outcome:
    """Return the outcome of a run of two ranks that generates in a layout."""
    shape = {"hidden_size": 128, "num_key_value_heads": 2}  # heads of 32, a size that vLLM has
    module = runs.grpo(
        engine="vllm",
        generation=GenerationOptions(vllm=VLLMOptions(python=vllm_python()), max_cache_bytes=1 << 26),
        actor=tiny_model("llama", **shape),
        reference=tiny_model("llama", seed=1, **shape),
        sampling=SamplingParams(n=4, max_new_tokens=8, temperature=0.7, top_p=0.95),
        **settings,
    )
    callbacks: list[Callback] = [] if victim is None else [Killer(victim, num_updates // 2)]
    callbacks += [] if unwritten is None else [Spoiler(unwritten)]
    plan = runs.calls(actor_generate=layout, actor_train="dp2", reference_infer="dp2")
    return runs.train(module, plan, 2, Batches(num_updates), callbacks=callbacks)


@pytest.mark.parametrize(
    ("layout", "settings", "victim"),
    [("tp2", {}, "worker"), ("dp1@0", {"peft_config": LORA}, None), ("tp2", {"peft_config": LORA}, None)],
    ids=["shards, and a worker is killed", "adapters", "adapters of shards"],
)
def test_log_probabilities_are_those_of_training_after_every_update(
    layout: str, settings: dict[str, Any], victim: str | None, workers: WorkerPool
) -> None:
    shared = left_in_shared_memory()
    outcome = workers.run(
        train, layout, NUM_UPDATES, settings, victim, world_size=2, deadline_s=1500, init_process_group=False
    )[0]
    assert len(outcome.logged) == NUM_UPDATES
    differences = [logged["actor/engine_difference"] for logged in outcome.logged]
    assert max(differences) < 1e-4, differences
    given = [logged["given_bytes/actor.generate"] for logged in outcome.logged]
    assert given == [logged["given_bytes_minimum/actor.generate"] for logged in outcome.logged]
    if settings:
        assert given[-1] < given[0] / 3 and len(set(given[1:])) == 1, "adapters alone"
    assert not vllm_processes() and left_in_shared_memory() <= shared


def error_of(*arguments: Any) -> str:
    """Return the error of a run."""
    write = SharedMemoryHandOver._write
    try:
        return f"finished: {train(*arguments)}"
    except WeightMismatch as error:
        return str(error)
    finally:
        SharedMemoryHandOver._write = write  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("layout", "settings", "unwritten"),
    [
        ("dp1@0", {}, "layers.1.mlp.down_proj.weight"),
        ("tp2", {}, "layers.1.mlp.down_proj.weight"),
        ("tp2", {"peft_config": LORA}, "layers.1.self_attn.q_proj.lora_B"),
    ],
    ids=["whole", "shards", "adapters of shards"],
)
def test_a_weight_that_is_not_handed_over_ends_the_run_by_name(
    layout: str, settings: dict[str, Any], unwritten: str, workers: WorkerPool
) -> None:
    errors = workers.run(
        error_of, layout, 4, settings, None, unwritten, world_size=2, deadline_s=600, init_process_group=False
    )
    words = (
        rf"version 1 of the weights of actor: .* from {layout}.*{re.escape(unwritten)}.* arrived with other elements"
    )
    assert re.search(words, errors[0]), errors
    assert not vllm_processes()


def test_a_killed_rank_leaves_nothing_of_its_vllm(workers: WorkerPool) -> None:
    shared = left_in_shared_memory()
    with pytest.raises(WorkerFailure):
        workers.run(train, "tp2@1,0", 2, {}, "rank", world_size=2, deadline_s=900, init_process_group=False)
    assert wait_until(lambda: not any(map(is_running, vllm_processes())), most_s=60)
    assert wait_until(lambda: left_in_shared_memory() <= shared, most_s=60)
