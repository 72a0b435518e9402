"""Ray's launcher on a cluster of two machines, both of which are this one: ranks, faults, signals and rewards."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from safetensors.torch import load_file
from torch import Tensor

from examples import demo
from lightning_realloc.errors import ConfigError, RankLost, RewardError
from lightning_realloc.rewards import RayReward
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.ray_options import RayOptions
from lightning_realloc.strategies.ray import ray_cluster
from tests.strategies import runs
from tests.strategies.ray import ray_runs
from tests.strategies.ray.ray_runs import Fails, Fault, OddError

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'lightning-realloc[ray]'")
pytestmark = pytest.mark.ray

SMALL = {
    "num_ranks": 2, "num_demonstrations": 3200, "right_demonstrations": 1.0, "warm_up_epochs": 3,
    "warm_up_layout": "dp2", "num_prompts": 16, "epochs": 3, "prompts_per_iteration": 8, "responses_per_prompt": 4,
    "num_held_out": 16, "generate_layout": "tp2", "infer_layout": "dp2", "train_layout": "fsdp2",
}  # fmt: skip
"""Settings with which a few answers are right, so that rewards and gradients are not zero."""
SMALL_DEMO = f"""
from pathlib import Path
from examples.demo import Settings, run

if __name__ == "__main__":
    run(Settings(**{SMALL!r}, folder=Path("here")))
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two machines of two processors each; this process is on the first one."""
    with ray_runs.started_cluster() as started:
        add_machine(started)
        yield started


def add_machine(cluster: Any) -> None:
    """Add the second machine, unless it is there."""
    if not cluster.worker_nodes:
        cluster.add_node(**ray_runs.MACHINE, node_ip_address="127.0.0.3")


@pytest.fixture
def two_machines(cluster: Any) -> Iterator[Any]:
    """The cluster with both machines; one that a test ended is replaced."""
    for node in list(cluster.worker_nodes):
        if not node.remaining_processes_alive():
            cluster.remove_node(node, allow_graceful=False)
    add_machine(cluster)
    yield cluster
    assert ray.util.placement_group_table() is not None
    hook = sys.excepthook
    if type(hook).__module__.startswith("lightning_realloc"):
        sys.excepthook = sys.__excepthook__


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Weights and rewards of a run without faults, on two processes that Lightning spawned."""
    folder = tmp_path_factory.mktemp("spawned")
    weights = ray_runs.fit(ReallocStrategy(ray_runs.PLAN, launcher="spawn"), folder, devices=2)
    return weights, torch.load(folder / "rewards.pt")


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert that two sets of weights are equal bit for bit."""
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


def test_ranks_on_two_machines_train_to_the_same_bits_as_spawned_ones(
    two_machines: Any, spawned: tuple[dict[str, Tensor], list[list[float]]], tmp_path: Path
) -> None:
    weights = ray_runs.fit(ReallocStrategy(ray_runs.PLAN, launcher="ray"), tmp_path, devices=1, num_nodes=2)
    assert_equal(weights, spawned[0])
    assert torch.load(tmp_path / "rewards.pt") == spawned[1] and len(spawned[1]) == ray_runs.NUM_ITERATIONS


def test_a_lost_rank_and_a_lost_machine_are_survived_with_the_same_weights(
    two_machines: Any, spawned: tuple[dict[str, Tensor], list[list[float]]], tmp_path: Path
) -> None:
    here = ray.get_runtime_context().get_node_id()
    faults = (Fault(tmp_path, 3, "rank", here), Fault(tmp_path, 5, "machine", here))
    strategy = ReallocStrategy(ray_runs.PLAN, launcher="ray", max_failures=2)
    with pytest.warns(UserWarning) as caught:
        weights = ray_runs.fit(strategy, tmp_path, *faults, devices=1, num_nodes=2)
    texts = [str(one.message) for one in caught]
    first, second = (text for text in texts if "starting again from" in text)
    assert first.startswith("rank ") and "on node " in first and "(127.0.0." in first
    assert "failure 1 of 2" in first and first.endswith("step=2.ckpt")
    assert "failure 2 of 2" in second and second.endswith("step=4.ckpt")
    assert any("fewer machines than the plan's 2 nodes" in text for text in texts)  # the third start, on one machine
    assert {fault.mark.exists() for fault in faults} == {True}
    assert_equal(weights, spawned[0])
    assert torch.load(tmp_path / "rewards.pt") == spawned[1][4:]


def test_a_lost_rank_ends_the_run_and_is_named(two_machines: Any, tmp_path: Path) -> None:
    fault = Fault(tmp_path, 1, "rank", ray.get_runtime_context().get_node_id())
    with pytest.raises(RankLost, match=r"^rank [01] on node [01] \(127\.0\.0\.[23]\) was lost: "):
        ray_runs.fit(ReallocStrategy(ray_runs.PLAN, launcher="ray"), tmp_path, fault, devices=1, num_nodes=2)


def test_an_exception_of_a_rank_comes_back_as_itself(two_machines: Any, tmp_path: Path) -> None:
    with pytest.raises(OddError) as caught:
        ray_runs.fit("realloc_ray", tmp_path, Fails(), devices=2, num_nodes=2)
    # Two ranks on each machine: the last one is the second on the second of the plan's nodes.
    assert caught.value.rank == 3 and caught.value.where.startswith("RANK=3 NODE_RANK=1 LOCAL_RANK=1 on 127.0.0.")
    (note,) = caught.value.__notes__
    assert note.startswith("raised on rank 3 on node 1") and "raise OddError" in note


def test_sigterm_ends_all_ranks_after_an_iteration_with_a_checkpoint(two_machines: Any, tmp_path: Path) -> None:
    def send() -> None:
        give_up_at = time.monotonic() + 120.0
        while not (tmp_path / "under way").exists() and time.monotonic() < give_up_at:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(SIGTERMException) as caught:
        ray_runs.fit_for_long("realloc_ray", tmp_path)
    sender.join()
    assert caught.value.code == 143
    assert (tmp_path / "on_exception.ckpt").exists()


def judge_class() -> Any:
    """Return an actor class. It is nested, so that it travels by value, and its process imports no torch."""

    class Judge:
        def score(self, prompts: list[str], completions: list[str], answer: list[str]) -> list[float | None]:
            if "fail" in answer:
                raise ValueError("no such answer")
            return [float(len(text)) or None for text in completions]

    return ray.remote(num_cpus=0)(Judge)


def test_actors_and_remote_functions_are_rewards(two_machines: Any) -> None:
    actors = [judge_class().remote() for _ in range(2)]
    named = judge_class().options(name="judge").remote()
    given = {"prompts": ["p"] * 5, "completions": ["a", "bb", "", "cccc", "d"], "completion_ids": [[1]] * 5}
    for judges in (actors, "judge"):
        reward = RayReward(judges, columns=["answer"], chunk_size=2)
        reward.start()
        assert reward(**given, answer=["x"] * 5, unused=["y"] * 5) == [1.0, 2.0, None, 4.0, 1.0]

    @ray.remote(num_cpus=0)
    def longest(prompts: list[str], completions: list[str], **columns: object) -> list[float]:
        return [float(max(map(len, completions)))] * len(completions)

    assert RayReward(longest, chunk_size=3)(**given) == [2.0, 2.0, 2.0, 4.0, 4.0]

    masked = RayReward(actors, columns=["answer"], chunk_size=2, on_failure="mask")
    results = masked(**given, answer=["x", "x", "fail", "x", "x"])
    assert results[:2] == [1.0, 2.0] and results[4:] == [1.0]
    assert all(one.reason == "ray: ValueError: no such answer" for one in results[2:4])
    ray.kill(named)
    with pytest.raises(RewardError, match="5 of 5 completions could not be judged"):
        RayReward(named, columns=["answer"], timeout_s=30.0)(**given, answer=["x"] * 5)
    with pytest.raises(RewardError, match="Ray has no actor named 'nobody'"):
        RayReward("nobody").start()


# ---- the demo
@pytest.fixture(scope="module")
def demo_here(tmp_path_factory: pytest.TempPathFactory) -> demo.Settings:
    """Settings of a small run of the demo, after a run on two processes that the ordinary launcher started."""
    folder = tmp_path_factory.mktemp("demo")
    (folder / "small.py").write_text(SMALL_DEMO)
    variables = os.environ | {"PYTHONPATH": str(Path(demo.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "small.py"],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return demo.Settings(**(SMALL | {"folder": folder / "here"}))


def logged(settings: demo.Settings) -> list[dict[str, str]]:
    """Return the metrics of GRPO that a run has logged, without those that depend on the clock."""
    with (settings.folder / "logs/grpo/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    clock = ("seconds/", "idle_share", "reallocation_", "tokens_per_s", "peak_memory", "moved_samples/")
    return [{name: cell for name, cell in row.items() if not name.startswith(clock)} for row in rows]


def weights(settings: demo.Settings) -> dict[str, Tensor]:
    """Return the trained actor of a run."""
    return load_file(settings.folder / "trained/model.safetensors")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_on_two_machines_reaches_the_same_rewards_and_weights(
    two_machines: Any, demo_here: demo.Settings, tmp_path: Path
) -> None:
    there = replace(demo_here, folder=tmp_path / "ray", launcher="ray", num_nodes=2)
    demo.run(there)
    here = json.loads((demo_here.folder / "summary.json").read_text())
    summary = json.loads((there.folder / "summary.json").read_text())
    same = ("reward_before", "reward_after", "reward_by_iteration", "iterations", "world_size", "plan")
    assert {name: summary[name] for name in same} == {name: here[name] for name in same}
    assert len(summary["reward_by_iteration"]) == 6 and summary["iterations"] == 6
    assert 0.0 < min(summary["reward_by_iteration"]) < max(summary["reward_by_iteration"]) < 1.0
    # The first row is of the evaluation before training, whose processes on Ray are others than those of the fit.
    assert logged(there) == logged(demo_here)[1:] and len(logged(there)) == 9
    assert_equal(weights(there), weights(demo_here))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_survives_a_lost_rank_and_a_lost_machine(
    two_machines: Any, demo_here: demo.Settings, tmp_path: Path
) -> None:
    folder = tmp_path / "ray"
    shutil.copytree(
        demo_here.folder, folder, ignore=shutil.ignore_patterns("logs", "checkpoints", "trained", "summary.json")
    )
    there = replace(demo_here, folder=folder, launcher="ray", num_nodes=2, max_failures=2)
    spared = ray.get_runtime_context().get_node_id()
    faults = [Fault(tmp_path, 3, "rank", spared), Fault(tmp_path, 5, "machine", spared)]
    with pytest.warns(UserWarning) as caught:
        demo.learn_from_rewards(there, faults)
    again = [str(one.message) for one in caught if "starting again from" in str(one.message)]
    assert len(again) == 2 and all(text.endswith("last.ckpt") for text in again), again
    assert {fault.mark.exists() for fault in faults} == {True}
    rewards, expected = (
        [each["reward"] for each in json.loads((place.folder / demo.RECORDING).read_text())["iterations"]]
        for place in (there, demo_here)
    )
    assert rewards == expected and len(rewards) == 6
    assert_equal(weights(there), weights(demo_here))


def test_a_cluster_that_is_too_small_or_not_there_is_refused(two_machines: Any) -> None:
    strategy = ReallocStrategy(launcher=RayOptions(placement_timeout=1.5))
    with pytest.raises(
        ConfigError,
        match=r"^Ray did not provide 2 x \(8 CPU\) within 2(\.\d+)? s; Ray has 2 machines: 2 with 2 CPU, 0 GPU;",
    ):
        runs.trainer(strategy, 8, num_nodes=2).fit(runs.grpo(), runs.Batches(1))
    with pytest.raises(ConfigError, match=r"^RAY_ADDRESS='127\.0\.0\.1:1' cannot be reached .*refused"):
        ray_cluster.refuse_unreachable("127.0.0.1:1")
    with pytest.raises(ConfigError, match="it is not host:port"):
        ray_cluster.refuse_unreachable("ray://head:10001")
