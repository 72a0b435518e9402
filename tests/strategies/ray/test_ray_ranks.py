"""Placement, environment and failures of ranks in Ray actors: the parts that need no cluster."""

from __future__ import annotations

import pickle
import signal
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_realloc.errors import CheckpointError, ConfigError, DataError, GenerationError, RankLost, class_name
from lightning_realloc.generation.vllm.messages import StartFailed
from lightning_realloc.retries import attempts
from lightning_realloc.runtime.messages.failure_store import peer_error
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.lightning.launch_options import LaunchOptions
from lightning_realloc.strategies.ray import ray_cluster
from lightning_realloc.strategies.ray.bundles import RayPlacement
from lightning_realloc.strategies.ray.rank_group import RankGroup
from lightning_realloc.strategies.ray.ray_launcher import RankWork, RayLauncher, last_complete, restarted
from lightning_realloc.strategies.ray.ray_ranks import (
    RankFailure,
    RankPlace,
    describe_failure,
    forwarded_variables,
    rank_environments,
)
from tests.strategies import runs
from tests.strategies.checkpoints.remote.object_stores import Faults, ObjectStore, address

HAS_RAY = ray_cluster.ray_version() is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'lightning-realloc[ray]'")


# ---- environment
@given(num_nodes=st.integers(1, 4), per_node=st.integers(1, 4))
def test_ranks_are_consecutive_on_each_node_and_find_their_own_gpu_at_their_local_rank(
    num_nodes: int, per_node: int
) -> None:
    # Ray numbers the GPUs of a machine as it likes; here downwards.
    places = [
        RankPlace(f"id{node}", f"10.0.0.{node}", 100 + local, 5000 + node, (str(7 - local),))
        for node in range(num_nodes)
        for local in range(per_node)
    ]
    environments = rank_environments(places, per_node)
    assert [int(one["RANK"]) for one in environments] == list(range(num_nodes * per_node))
    for one, place in zip(environments, places, strict=True):
        assert int(one["RANK"]) == int(one["NODE_RANK"]) * per_node + int(one["LOCAL_RANK"])
        assert (one["MASTER_ADDR"], one["MASTER_PORT"]) == ("10.0.0.0" if num_nodes > 1 else "127.0.0.1", "5000")
        assert (one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) == (str(num_nodes * per_node), str(per_node))
        assert place.address == f"10.0.0.{one['NODE_RANK']}"
        assert one["CUDA_VISIBLE_DEVICES"].split(",")[int(one["LOCAL_RANK"])] == place.gpu_ids[0]
    isolated = rank_environments(places, per_node, isolate_gpus=True)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in isolated] == [place.gpu_ids[0] for place in places]


def test_ranks_on_a_cpu_see_the_gpus_that_ray_shows_them() -> None:
    (environment,) = rank_environments([RankPlace("id", "10.0.0.1", 1, 5000)], 1)
    assert "CUDA_VISIBLE_DEVICES" not in environment


def test_ranks_take_over_settings_of_libraries_and_no_secrets() -> None:
    libraries = {"NCCL_DEBUG": "INFO", "HF_HOME": "/models", "VLLM_PYTHON": "/env/bin/python"}
    assert forwarded_variables({**libraries, "HF_TOKEN": "hf", "RANK": "0", "PATH": "/bin"}) == libraries


# ---- failures
class Stubborn(Exception):
    """Exception that cannot be pickled."""

    def __reduce__(self) -> str:
        raise TypeError("no")


@needs_ray
def test_an_error_is_sent_as_itself_and_as_text_if_it_cannot_be_pickled() -> None:
    sent = describe_failure(DataError("rows are empty"))
    assert type(sent.error) is DataError and not sent.is_stop and not sent.is_consequence
    assert "DataError: rows are empty" in sent.trace

    sent = describe_failure(Stubborn("of the user"))
    assert repr(sent.error) == "RuntimeError('Stubborn: of the user')"

    assert describe_failure(RankLost("rank 1 ended")).is_consequence


@needs_ray
def test_a_rank_that_a_signal_ended_is_stopped_and_has_not_failed() -> None:
    stopped = SIGTERMException()
    stopped.code = 138
    assert [describe_failure(one).exit_code for one in (stopped, KeyboardInterrupt(), SystemExit(1), ValueError())] == [
        138,
        130,
        1,
        None,
    ]
    assert describe_failure(stopped).is_stop and describe_failure(KeyboardInterrupt()).is_stop
    assert not describe_failure(SystemExit(1)).is_stop  # a second Ctrl-C


def cause_of(failures: dict[int, RankFailure], *, silent: tuple[int, ...] = (), received: int = 0) -> BaseException:
    """Return the error that ends a run of two ranks on each of two nodes."""
    group = RankGroup(RayPlacement(2, 2, False), SimpleQueue())
    group._places = [RankPlace(f"id{rank // 2}", f"10.0.0.{rank // 2}", rank, 5000) for rank in range(4)]
    group._received = received
    return group._error(failures, silent=silent)


def test_the_cause_is_raised_and_not_its_consequences_on_other_ranks() -> None:
    closed = RankFailure(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"), "")
    lost = RankFailure(RankLost("rank 3 on node 1 (10.0.0.1) was lost"), "", is_lost=True)
    own = RankFailure(ValueError("of the user"), "Traceback")
    assert cause_of({0: closed, 3: lost, 2: own}) is lost.error
    assert cause_of({0: closed, 2: own}, silent=(1,)) is own.error
    assert own.error.__notes__ == ["raised on rank 2 on node 1 (10.0.0.1):\nTraceback"]
    # Machines that vanish are known to Ray after seconds only.
    silent = cause_of({0: closed, 1: closed}, silent=(2, 3))
    assert isinstance(silent, RankLost)
    assert str(silent).startswith("rank 2 on node 1 (10.0.0.1), rank 3 on node 1 (10.0.0.1) did not answer within 10 s")
    broken = cause_of({1: closed, 0: closed})
    assert isinstance(broken, RankLost) and str(broken).startswith("rank 1 on node 0 (10.0.0.0) lost the connection")


def test_a_vllm_that_does_not_start_is_no_lost_rank_which_would_start_the_run_again() -> None:
    error = StartFailed("ModuleNotFoundError: No module named 'msgspec' (vLLM for actor on rank 1 does not start)")
    assert type(pickle.loads(pickle.dumps(error))) is StartFailed, "as it is sent"
    own = RankFailure(error, "")
    copied = RankFailure(peer_error(1, class_name(error), str(error)), "")
    for failures in ({1: own, 0: copied}, {0: copied, 1: own}):
        found = cause_of(failures)
        assert type(found) in (StartFailed, GenerationError) and not isinstance(found, RankLost)
        assert str(found) == str(own.error)


def test_ranks_that_end_after_a_signal_are_no_failure() -> None:
    stopped = RankFailure(SIGTERMException(), "", exit_code=138)
    died = RankFailure(RankLost("rank 1 on node 0 was lost"), "", is_lost=True)  # before it had a handler
    for failures, code in (({0: stopped, 1: stopped}, 138), ({0: died, 1: stopped}, 138), ({0: died, 1: died}, 143)):
        ended = cause_of(failures, received=signal.SIGTERM)
        assert isinstance(ended, SIGTERMException) and ended.code == code


# ---- starting again
def _fit(model: object, data: object = None, ckpt_path: str | None = None) -> str | None:
    return ckpt_path


def test_a_run_that_starts_again_begins_with_the_checkpoint() -> None:
    launcher = object.__new__(RayLauncher)
    for args, kwargs in ((("model", "data", "first.ckpt"), {}), (("model",), {"data": 1}), (("model", None, None), {})):
        again = RankWork(launcher, _fit, args, kwargs, None, None).resumed_from("second.ckpt")  # type: ignore[arg-type]
        assert again.function(*again.args, **again.kwargs) == "second.ckpt"
        assert again.args[0] == "model"


def test_the_last_complete_checkpoint_is_chosen(tmp_path: Path) -> None:
    complete, begun, removed = tmp_path / "1.ckpt", tmp_path / "2.ckpt", tmp_path / "0.ckpt"
    torch.save({}, complete)
    begun.mkdir()  # a folder of shards without its description
    torn = tmp_path / "3.ckpt"
    torn.write_bytes(complete.read_bytes()[:-1])
    assert last_complete([str(removed), str(complete), str(begun), str(torn)]) == str(complete)
    assert last_complete([str(removed), str(begun)]) is None


def test_a_run_in_a_store_starts_again_from_its_last_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []
    begun: list[int] = []

    def fit(max_steps: int, ckpt_path: str | None = None) -> None:
        saves = ModelCheckpoint(
            address(tmp_path), "{step}", every_n_train_steps=1, save_top_k=-1, save_last=True,
            enable_version_counter=False,
        )  # fmt: skip
        strategy = ReallocStrategy("static")
        strategy.on_checkpoint = saved.append  # as a rank of Ray reports them
        fitted = runs.trainer(strategy, 1, max_steps=max_steps, enable_checkpointing=True, callbacks=[saves])
        fitted.fit(runs.sft(), runs.Batches(3, responses=True), ckpt_path=ckpt_path)
        begun.append(fitted.global_step)

    fit(2)
    assert saved == [address(tmp_path / name) for name in ("step=1.ckpt", "last.ckpt", "step=2.ckpt", "last.ckpt")]
    work = RankWork(object.__new__(RayLauncher), fit, (3,), {}, None, None)  # type: ignore[arg-type]
    assert restarted(work, []) is work
    unfinished = address(tmp_path / "step=3.ckpt")  # was being written when the rank was lost
    (tmp_path / "step=3.ckpt" / "save-0123456789ab").mkdir(parents=True)
    (tmp_path / "step=3.ckpt" / "save-0123456789ab" / "meta.pt").write_bytes(b"")
    again = restarted(work, [*saved, unfinished])
    assert again.args == (3, address(tmp_path / "step=2.ckpt"))
    monkeypatch.setattr(ObjectStore, "faults", faults := Faults(lambda name, path, now_s: True))
    monkeypatch.setattr(attempts, "sleep", faults.wait)
    with pytest.raises(CheckpointError, match=r"^the last checkpoint is not known, since .*: ConnectionResetError: .*"):
        restarted(work, saved)
    monkeypatch.setattr(ObjectStore, "faults", None)
    again.function(*again.args)
    assert begun == [2, 3]


# ---- settings
def test_settings_without_effect_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_failures=2 needs launcher='ray'; launcher='popen' starts processes"):
        ReallocStrategy(max_failures=2)
    with pytest.raises(ConfigError, match="max_failures=-1 must be at least 0"):
        LaunchOptions(launcher="ray", max_failures=-1)


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        (None, "launcher='ray' needs Ray, which is not installed: pip install 'lightning-realloc[ray]'"),
        ("2.9.3", "launcher='ray' needs Ray 2.40 or newer, and 2.9.3 is installed: pip install 'ray>=2.40'"),
    ],
)
def test_a_trainer_without_a_usable_ray_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, installed: str | None, message: str
) -> None:
    monkeypatch.setattr(ray_cluster, "ray_version", lambda: installed)
    with pytest.raises(ConfigError) as caught:
        runs.trainer("realloc_ray", 2, num_nodes=2)
    assert str(caught.value) == message


def test_a_newer_ray_than_the_tested_one_gets_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ray_version", lambda: "99.0")
    with pytest.warns(UserWarning, match=r"Ray 99\.0 is newer than 2\.60, the newest version that was tested"):
        assert isinstance(runs.trainer("realloc_ray", 1).strategy.launcher, RayLauncher)  # also for a single rank


def test_ray_starts_ranks_inside_a_slurm_job_and_is_refused_below_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ray_version", lambda: "2.60.0")
    with monkeypatch.context() as slurm:
        for name in ("NTASKS", "NTASKS_PER_NODE", "JOB_NAME", "JOB_ID", "NODEID", "PROCID", "LOCALID"):
            slurm.setenv(f"SLURM_{name}", "1")
        strategy = runs.trainer("realloc_ray", 1).strategy
        assert isinstance(strategy.launcher, RayLauncher)
        assert not strategy.cluster_environment.creates_processes_externally  # type: ignore[attr-defined]
    for name, value in {"TORCHELASTIC_RUN_ID": "run", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"launcher='ray' starts the ranks itself, .* run the script once"):
        runs.trainer("realloc_ray", 2)


def test_a_signal_before_the_ranks_exist_is_kept_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "ray_version", lambda: "2.60.0")
    launcher = runs.trainer("realloc_ray", 1).strategy.launcher
    assert isinstance(launcher, RayLauncher)
    launcher.kill(signal.SIGTERM)
    group = RankGroup(RayPlacement(1, 1, False), launcher._signals)
    with pytest.raises(SIGTERMException) as caught:
        group._end_if_stopped()
    assert caught.value.code == 143
    assert "_signals" not in launcher.__getstate__() and pickle.dumps(launcher.__getstate__()["procs"])
