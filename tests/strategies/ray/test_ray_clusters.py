"""Ray as its operators run it: clusters that grow and shrink, jobs that are submitted again, heads without GPUs."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_realloc.errors import ConfigError
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.ray_options import RayOptions
from tests.emulated_cuda.__main__ import START_UP
from tests.matrices import matrix
from tests.strategies import runs
from tests.strategies.ray import ray_runs
from tests.strategies.ray.ray_runs import MACHINE, Devices, Fault

ray = pytest.importorskip("ray", reason="needs Ray: pip install 'lightning-realloc[ray]'")
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[3]
ONE_CPU = {**MACHINE, "num_cpus": 1}
JOB = """
import sys
from pathlib import Path

from lightning_realloc.strategies import ReallocStrategy
from tests.strategies.ray import ray_runs

folder = Path(sys.argv[1])
strategy = ReallocStrategy(ray_runs.PLAN, launcher="ray")
fault = ray_runs.DriverFault(folder, 3)
weights = ray_runs.fit(strategy, folder, fault, devices=1, num_nodes=2, ckpt_path="last")
ray_runs.torch.save(weights, folder / "weights.pt")
"""
"""Script of a job; started again, it goes on from the last checkpoint."""


@pytest.fixture(scope="module")
def spawned(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Weights of a run without faults, on two processes that Lightning spawned."""
    strategy = ReallocStrategy(ray_runs.PLAN, launcher="spawn")
    return ray_runs.fit(strategy, tmp_path_factory.mktemp("spawned"), devices=2)


@pytest.fixture
def small() -> Iterator[Any]:
    """A cluster of one machine with one processor, too small for two ranks."""
    with ray_runs.started_cluster(num_cpus=1) as started:
        yield started


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    """Assert that two sets of weights are equal bit for bit."""
    assert ours.keys() == theirs.keys() and len(ours) > 10
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight), name


def wait_for(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    """Wait for a condition."""
    give_up_at = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition has not come in time"
        time.sleep(0.5)


def ray_command(*arguments: str, **options: Any) -> str:
    """Run Ray's command line, and return what it prints."""
    command = [sys.executable, "-m", "ray.scripts.scripts", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **options)
    return done.stdout + done.stderr


# ---- machines that come and go
def test_a_cluster_that_is_too_small_shows_the_demand_and_trains_once_a_machine_comes(
    small: Any, spawned: dict[str, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str] = []

    def is_shown() -> bool:
        shown.append(ray_command("status", "--address", small.address))
        return "pending placement groups" in shown[-1]

    def grow() -> None:
        wait_for(is_shown)
        small.add_node(**ONE_CPU, node_ip_address="127.0.0.3")

    operator = threading.Thread(target=grow)
    operator.start()
    with caplog.at_level(logging.WARNING):
        weights = ray_runs.fit(ReallocStrategy(ray_runs.PLAN, launcher="ray"), tmp_path, devices=1, num_nodes=2)
    operator.join()
    assert re.search(r"\{'CPU': 1\.0\} \* 2 \(SPREAD\): 1\+ pending placement groups", shown[-1])
    assert "waiting for at most 120 s for 2 x (1 CPU); Ray has 1 machine: 1 with 1 CPU, 0 GPU" in caplog.text
    assert_equal(weights, spawned)


@pytest.mark.parametrize("absent_s", matrix([60.0, 240.0], 60.0))
def test_a_lost_machine_is_waited_for_and_the_run_goes_on(
    small: Any, spawned: dict[str, Tensor], tmp_path: Path, absent_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    lost = small.add_node(**ONE_CPU, node_ip_address="127.0.0.3")
    fault = Fault(tmp_path, 3, "machine", ray.get_runtime_context().get_node_id())

    def replace_machine() -> None:
        wait_for(lambda: not lost.remaining_processes_alive() or fault.mark.exists())
        time.sleep(absent_s)
        small.add_node(**ONE_CPU, node_ip_address="127.0.0.4")

    operator = threading.Thread(target=replace_machine)
    operator.start()
    strategy = ReallocStrategy(ray_runs.PLAN, launcher="ray", max_failures=1)  # the loss is the last allowed failure
    with caplog.at_level(logging.WARNING), pytest.warns(UserWarning, match=r"failure 1 of 1, .*step=2\.ckpt"):
        weights = ray_runs.fit(strategy, tmp_path, fault, devices=1, num_nodes=2)
    operator.join()
    assert fault.mark.exists() and "waiting without end for 2 x (1 CPU)" in caplog.text
    assert_equal(weights, spawned)


def test_a_run_goes_on_with_fewer_machines_where_its_plan_allows_it(tmp_path: Path) -> None:
    with ray_runs.started_cluster() as cluster:
        cluster.add_node(**MACHINE, node_ip_address="127.0.0.3")
        fault = Fault(tmp_path, 3, "machine", ray.get_runtime_context().get_node_id())
        launcher = RayOptions(min_nodes=1, placement_timeout=4.0)
        strategy = ReallocStrategy(launcher=launcher, max_failures=1)
        with pytest.warns(UserWarning, match=r"this start has 2 of 4 ranks \(min_nodes=1\)"):
            weights = ray_runs.fit(strategy, tmp_path, fault, Devices(tmp_path), devices=2, num_nodes=2)
    assert {json.loads((tmp_path / f"rank{rank}.json").read_text())["ranks"] for rank in (0, 1)} == {2}
    assert json.loads((tmp_path / "rank3.json").read_text())["ranks"] == 4  # of the first start
    (tmp_path / "spawned").mkdir()
    whole = ray_runs.fit(ReallocStrategy(launcher="spawn"), tmp_path / "spawned", devices=4)
    for name, weight in whole.items():  # rounding alone differs, see the page on checkpoints
        torch.testing.assert_close(weights[name], weight, rtol=0.0, atol=5e-4)


# ---- jobs
def test_a_job_whose_driver_is_killed_goes_on_when_it_is_submitted_again(
    spawned: dict[str, Tensor], tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # of the machines' processes
        with ray_runs.started_cluster(connects=False, include_dashboard=True, dashboard_port=0) as cluster:
            cluster.add_node(**MACHINE, node_ip_address="127.0.0.3")
            address = f"http://{cluster.webui_url}"
            entry = ("--", sys.executable, str(script), str(tmp_path))
            first = ray_command("job", "submit", "--address", address, *entry, env=variables)
            assert "failed" in first.lower() and (tmp_path / "driver 3").exists(), first
            second = ray_command("job", "submit", "--address", address, *entry, env=variables)
            assert "succeeded" in second.lower(), second
    assert "step=2" in second or "last.ckpt" in second, second
    assert_equal(torch.load(tmp_path / "weights.pt"), spawned)


# ---- accelerators
def test_a_head_without_gpus_starts_ranks_on_gpus(spawned: dict[str, Tensor], tmp_path: Path) -> None:
    # Ray's GPUs are numbers; ranks have an emulated device, which the calling process lacks.
    variables = {"PYTHONPATH": os.pathsep.join([str(START_UP), str(ROOT)])}
    launcher = RayOptions(use_gpus=True, isolate_gpus=True, runtime_env={"env_vars": variables})
    assert not torch.cuda.is_available()
    subprocess.run([sys.executable, "-c", ""], env={**os.environ, **variables}, check=True)  # builds the device once
    with ray_runs.started_cluster() as cluster:
        for last in (3, 4):
            cluster.add_node(**MACHINE, num_gpus=1, node_ip_address=f"127.0.0.{last}")
        unused = pytest.warns(UserWarning, match=r"^Ray's machines have 2 GPUs, and the ranks of this run use none")
        with unused, pytest.raises(ConfigError, match="did not provide 2 x"):
            waits = ReallocStrategy(launcher=RayOptions(placement_timeout=1.0, num_cpus=64))
            runs.trainer(waits, 1, num_nodes=2).fit(runs.grpo(), runs.Batches(1))
        strategy = ReallocStrategy(ray_runs.PLAN, launcher=launcher)
        options = {"accelerator": "auto", "devices": 1, "num_nodes": 2}
        weights = ray_runs.fit(strategy, tmp_path, Devices(tmp_path), **options)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["device"] for one in seen] == ["cuda:0", "cuda:0"] and [one["visible"] for one in seen] == ["0", "0"]
    assert len({one["machine"] for one in seen}) == 2
    for name, weight in spawned.items():
        torch.testing.assert_close(weights[name], weight, rtol=0.0, atol=5e-4)


# ---- settings
def where(folder: str) -> None:
    """Write what Ray says of this rank."""
    context = ray.get_runtime_context()
    seen = {
        "machine": context.get_node_id(), "names": ray.util.list_named_actors(all_namespaces=True),
        "resources": context.get_assigned_resources(), "color": os.environ.get("COLOR"),
    }  # fmt: skip
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(seen))


def test_ranks_get_machines_resources_and_names_as_set(small: Any, tmp_path: Path) -> None:
    kinds = {}
    for last, kind in ((3, "large"), (4, "small")):
        node = small.add_node(
            **ONE_CPU, node_ip_address=f"127.0.0.{last}", labels={"kind": kind}, memory=2**30,
            resources={"nic": 2, "accelerator_type:A100": 1},
        )  # fmt: skip
        kinds[node.node_id] = kind
    plan = {"calls": {"actor.generate": "dp1@0", "actor.train": "dp1@1"}}
    launcher = RayOptions(
        labels={"actor.generate": {"kind": "small"}, "actor.train": {"kind": "!small"}},
        accelerator_type="A100", resources={"nic": 2}, memory="256MiB", name="run", namespace="team",
        runtime_env={"env_vars": {"COLOR": "blue"}},
    )  # fmt: skip
    trainer = runs.trainer(ReallocStrategy(plan, launcher=launcher), 1, num_nodes=2)
    trainer.strategy.launcher.launch(where, str(tmp_path))
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert [kinds[one["machine"]] for one in seen] == ["small", "large"]
    names = [{"name": f"run.0.rank{rank}", "namespace": "team"} for rank in (0, 1)]
    assert all(name in one["names"] for name in names for one in seen)
    assert {one["color"] for one in seen} == {"blue"}
    assert all(one["resources"]["nic"] == 2 and one["resources"]["memory"] == 2**28 for one in seen), seen

    misspelt = RayOptions(labels={"*": {"kynd": "small"}}, placement_timeout=1.0)
    with pytest.raises(ConfigError, match=r"no machine has the label kynd=small \(did you mean kind\?\)"):
        runs.trainer(ReallocStrategy(launcher=misspelt), 1).strategy.launcher.launch(where, str(tmp_path))
    broken = RayOptions(runtime_env={"working_dir": "file:///nowhere.zip"})
    with pytest.raises(ConfigError, match=r"the runtime environment of rank 0 on node 0 cannot be made: "):
        runs.trainer(ReallocStrategy(launcher=broken), 1).strategy.launcher.launch(where, str(tmp_path))


def test_weights_stay_on_the_cluster_and_the_last_checkpoint_is_known(tmp_path: Path) -> None:
    with ray_runs.started_cluster():
        strategy = ReallocStrategy(ray_runs.PLAN, launcher=RayOptions(return_weights=False))
        module = runs.grpo()
        before = {name: weight.clone() for name, weight in module.state_dict().items()}
        checkpoint = ModelCheckpoint(tmp_path, every_n_train_steps=1, save_top_k=-1)
        trainer = runs.trainer(strategy, 2, enable_checkpointing=True, callbacks=[checkpoint])
        trainer.fit(module, runs.Batches(2))
        assert trainer.global_step == 2 and "reward" in trainer.callback_metrics
        assert (
            strategy.last_checkpoint == str(tmp_path / "epoch=0-step=2.ckpt")
            and Path(strategy.last_checkpoint).is_dir()
        )
        assert all(torch.equal(weight, before[name]) for name, weight in module.state_dict().items())
        with pytest.raises(ConfigError, match=r"trained stayed on the cluster.* ckpt_path='.*step=2\.ckpt'"):
            trainer.validate(module, runs.Batches(1))
