"""Weights that arrive while a rank generates: fresh enough, logged by token, and the same bits from the log again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_realloc import GenerationOptions
from lightning_realloc.callbacks import EMA
from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.errors import ConfigError, ReallocError
from lightning_realloc.generation import Speculation
from lightning_realloc.runtime.messages.failure_agreement import FAILURE_DEADLINE_S
from lightning_realloc.runtime.parallel.shards import local_tensors
from lightning_realloc.strategies import ReallocStrategy
from lightning_realloc.strategies.calls.weight_updates import BatchVersions, VersionLog
from tests.devices import CPU_ALONE
from tests.matrices import matrix
from tests.resume.cases import SaveAt
from tests.strategies import runs
from tests.strategies.runs import Batches
from tests.workers import WorkerFailure, WorkerPool

APART = {"actor.generate": "dp1@0", "reference.infer": "dp1@1", "actor.train": "dp1@1"}
TWO_PAIRS = {"actor.generate": "tp2@0-1", "reference.infer": "dp1@2", "actor.train": "tp2@2-3"}
STAGES = {"actor.generate": "pp2@1,0", "reference.infer": "dp1@2", "actor.train": "dp1@2"}
PLANS = {"apart": (2, APART), "pairs": (4, TWO_PAIRS), "stages": (3, STAGES)}
"""Number of ranks, and their plan."""
SAMPLING = {"sampling": runs.SamplingParams(n=2, max_new_tokens=24, stop_token_ids=tuple(range(120, 128)))}


@dataclass
class Result:
    """What one rank saw."""

    tokens: list[list[list[int]]]
    logged: list[dict[str, float]]
    weights: dict[str, Tensor]
    """Full weights of the actor after the run, on the first rank; {} on others."""
    replica: dict[str, Tensor]
    """This rank's part of the generating replica after the run."""
    versions: list[list[int]] = field(default_factory=list)
    """Versions of the tokens that this rank generated, by response."""


def train(
    plan: dict[str, str], folder: str, *, staleness: int = 2, sleep_s: float = 0.0, num_batches: int = 6,
    batch_size: int = 6, settings: dict[str, Any] | None = None, save_after: int | None = None,
    ckpt_path: str | None = None, **options: Any,
) -> Result:  # fmt: skip
    """Train, with a pause before every step of a generation."""
    world_size = runs.world_size()
    module: Any = runs.grpo(**SAMPLING | (settings or {}))
    roll_out, versions = module.roll_out, []

    def slow_roll_out(actor: Any, prompts: Any) -> Any:
        pause = actor._model.register_forward_pre_hook(lambda *_: time.sleep(sleep_s))
        made = roll_out(actor, prompts)
        pause.remove()
        versions.extend(made.ragged("versions").to_lists())
        return made

    module.roll_out = slow_roll_out
    strategy = ReallocStrategy({"calls": plan}, max_staleness=staleness, **options)
    record = runs.Record()
    saved = [] if save_after is None else [SaveAt(Path(folder), (save_after,))]
    trainer = runs.trainer(strategy, world_size, callbacks=[record, *saved], default_root_dir=folder)
    rows = next(iter(Batches(1, size=batch_size * num_batches)))
    trainer.fit(module, BatchLoader(rows, batch_size=batch_size, shuffle=False), ckpt_path=ckpt_path)
    replica = strategy.pool.target("actor.generate")
    part = local_tensors(replica.model) if strategy.global_rank in replica.layout else {}
    weights = strategy.full_weights("actor")
    return Result(
        module.tokens, record.logged, weights, {name: tensor.clone() for name, tensor in part.items()}, versions
    )


def run(workers: WorkerPool, num_ranks: int, *arguments: Any, **options: Any) -> list[Result]:
    results: list[Result] = workers.run(
        _train, arguments, options, world_size=num_ranks, init_process_group=False, deadline_s=120
    )
    return results


def _train(arguments: tuple[Any, ...], options: dict[str, Any]) -> Result:
    return train(*arguments, **options)


def lines(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the log of one rank."""
    return [json.loads(line) for line in (folder / "weight_versions" / f"rank_{rank}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def slow(workers: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[Result]]]:
    """``slow(name of a plan)`` returns a run with slow generation, made once, and its folder with checkpoint ``3``."""

    @cache
    def run_once(name: str) -> tuple[Path, list[Result]]:
        folder = tmp_path_factory.mktemp(name)
        return folder, run(workers, *PLANS[name], str(folder), sleep_s=0.02, save_after=3)

    return run_once


@pytest.mark.parametrize("name", matrix(PLANS, "apart"))
def test_a_slow_generation_takes_newer_weights_and_its_log_repeats_it(
    workers: WorkerPool, tmp_path: Path, slow: Callable[[str], tuple[Path, list[Result]]], name: str
) -> None:
    folder, first = slow(name)
    log = lines(folder, 0)
    assert [line["iteration"] for line in log] == list(range(6))
    assert any(steps > 0 for line in log for steps, _ in line["updates"]), "weights arrived between two tokens"
    for line in log:
        taken = [line["begin"], *(version for _, version in line["updates"])]
        assert line["iteration"] - 2 <= taken[0] and all(after == before + 1 for before, after in pairwise(taken))
    for response in first[0].versions:
        assert response == sorted(response)
    assert len({tuple(response) for response in first[0].versions}) > 6, "some responses have tokens of two versions"
    assert all(0.0 <= step["staleness"] <= 2.0 for step in first[0].logged if "staleness" in step)
    assert sum(step.get("weight_updates/actor.generate", 0.0) for step in first[0].logged) > 0

    again = run(workers, *PLANS[name], str(tmp_path), replay_versions=str(folder / "weight_versions"))
    assert again[0].tokens == first[0].tokens
    assert again[0].versions == first[0].versions
    for name, tensor in first[0].weights.items():
        assert torch.equal(again[0].weights[name], tensor)
    assert lines(tmp_path, 0) == log


def test_a_resumed_run_repeats_the_rest_from_the_log(
    workers: WorkerPool, tmp_path: Path, slow: Callable[[str], tuple[Path, list[Result]]]
) -> None:
    folder, (straight, _) = slow("apart")
    options = {"replay_versions": str(folder / "weight_versions"), "ckpt_path": str(folder / "3")}
    resumed, _ = run(workers, 2, APART, str(tmp_path), **options)
    assert resumed.tokens == straight.tokens[-len(resumed.tokens) :] and len(resumed.tokens) == 5  # two had waited
    for name, tensor in straight.weights.items():
        assert torch.equal(resumed.weights[name], tensor)


@CPU_ALONE
def test_the_replica_ends_with_the_trained_weights(slow: Callable[[str], tuple[Path, list[Result]]]) -> None:
    _, (generating, _) = slow("apart")
    for name, tensor in generating.replica.items():
        assert torch.equal(tensor, generating.weights[name]), name


@pytest.mark.exhaustive  # changing ones: above, from the log
def test_weights_that_do_not_change_give_the_responses_of_a_run_in_step(workers: WorkerPool, tmp_path: Path) -> None:
    options: dict[str, Any] = {"settings": {"learning_rate": 0.0}, "sleep_s": 0.005}
    ahead = run(workers, 2, APART, str(tmp_path), staleness=4, **options)[0]
    plain = run(workers, 2, APART, str(tmp_path), staleness=2, overlap="none", settings={"learning_rate": 0.0})[0]
    assert ahead.tokens == plain.tokens
    assert ahead.versions != plain.versions  # newer versions came during the generation


def validate(max_staleness: int, overlap: str, folder: str) -> tuple[list[list[list[int]]], list[float]]:
    """Train PPO with averages that replace the weights during validation; return tokens and held-out rewards."""
    module: Any = runs.ppo(learning_rate=0.0)
    plan = {"actor.generate": "dp2@0-1", "reference.infer": "dp1@2", "critic.infer": "dp1@2"}
    plan |= {"actor.train": "dp1@2", "critic.train": "dp1@2"}
    strategy = ReallocStrategy({"calls": plan}, max_staleness=max_staleness, overlap=overlap)
    record = runs.Record()
    trainer = runs.trainer(
        strategy, runs.world_size(), callbacks=[EMA(decay=0.5), record], default_root_dir=folder, val_check_interval=1,
    )  # fmt: skip
    trainer.fit(module, Batches(4), Batches(1, seed=1))
    return module.tokens, [step["val/score"] for step in record.logged if "val/score" in step]


@pytest.mark.exhaustive  # averages: tests/callbacks/test_ema.py
@pytest.mark.parametrize("max_staleness", [1, 3])
def test_validation_after_every_iteration_reads_averages_and_goes_on(
    workers: WorkerPool, tmp_path: Path, max_staleness: int
) -> None:
    pushed, moved = (
        workers.run(
            validate, max_staleness, overlap, str(tmp_path), world_size=3, init_process_group=False, deadline_s=120
        )[0]
        for overlap in ("iterations", "none")
    )
    assert pushed == moved and len(pushed[1]) > 0


def fail(plan: dict[str, str], folder: str, method: str) -> float:
    """Train until a method fails in its fourth call; return the seconds until the fit ends on this rank.

    They count from the failure where it happens, else from the beginning.
    """
    module: Any = runs.grpo(**SAMPLING)
    works, count, begin = getattr(module, method), 0, time.monotonic()

    def broken(*arguments: Any) -> Any:
        nonlocal count, begin
        count += 1
        if count == 4:
            begin = time.monotonic()
            raise ValueError("broken on purpose")
        return works(*arguments)

    setattr(module, method, broken)
    strategy = ReallocStrategy({"calls": plan}, max_staleness=3)
    trainer = runs.trainer(strategy, runs.world_size(), default_root_dir=folder)
    with pytest.raises((ValueError, ReallocError), match="broken on purpose"):
        trainer.fit(module, Batches(8))
    return time.monotonic() - begin


@pytest.mark.parametrize(("method", "failed"), [("roll_out", 0), ("actor_loss", 1)])
def test_an_error_on_either_side_ends_both(workers: WorkerPool, tmp_path: Path, method: str, failed: int) -> None:
    seconds = workers.run(fail, APART, str(tmp_path), method, world_size=2, init_process_group=False, deadline_s=60)
    assert max(seconds) < 30.0
    assert seconds[failed] < FAILURE_DEADLINE_S / 2, "it waited until the other rank read what that rank knew already"


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"generation": GenerationOptions(sample_reallocation=True)}, {},
        "use sample_reallocation=False, or max_staleness=1",
    ),
    (
        {"speculation": Speculation(drafter="ngram")}, {"replay_versions": "."},
        "use Speculation(num_draft_tokens=4), say, in both runs",
    ),
    ({}, {"replay_versions": "."}, "the log has no line for actor.generate in iteration 0"),
    ({}, {"replay_versions": "nowhere"}, "there is no folder nowhere"),
    ({"ratio_to": "proximal"}, {}, "or correction='token-truncate', which weighs by what was learnt"),
]  # fmt: skip
"""Settings of the algorithm and of the strategy, and a part of the error."""


def refusals(folder: str, cases: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Return the error of each case on this rank."""
    environment, found = dict(os.environ), []
    for settings, options in cases:
        os.environ.update(environment)  # Lightning clears the environment
        with pytest.raises((ConfigError, ReallocError)) as error:
            train(APART, folder, settings=settings, **options)
        found.append(str(error.value))
    return found


def test_what_cannot_run_ahead_is_refused(workers: WorkerPool, tmp_path: Path) -> None:
    cases = [(settings, options) for settings, options, _ in REFUSED]
    everyone = workers.run(refusals, str(tmp_path), cases, world_size=2, init_process_group=False)
    for (*_, message), *told in zip(REFUSED, *everyone, strict=True):
        assert any(message in text for text in told), (message, told)


def test_proximal_ratios_learn_from_older_responses_with_importance_weights(
    workers: WorkerPool, tmp_path: Path
) -> None:
    _, training = run(workers, 2, APART, str(tmp_path), settings={"correction": "token-truncate"})
    assert any(logged.get("actor/correction_weight", 1.0) != 1.0 for logged in training.logged)
    assert all(0 < logged.get("actor/effective_sample_size", 1.0) <= 1.0 + 1e-6 for logged in training.logged)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"iteration": 0}', "'updates'"),
        ("[]", "list indices"),
        ("no JSON", "Expecting value"),
        (BatchVersions(2, "actor.generate", 1, [(4, 3)]).line(), "a version that is trained only after its batch"),
    ],
)
def test_a_log_that_lists_no_versions_is_refused(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "rank_0.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=rf"line 1 of .*rank_0.jsonl does not list versions \(.*{reason}"):
        VersionLog(0, tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            BatchVersions(3, "actor.generate", 2, [(99, 3)]),
            r"lists the updates \[\(99, 3\)\]",
        ),
        (BatchVersions(3, "actor.generate", 0), "are of version 1 already, and the log lists 0; give the log"),
    ],
)
def test_a_log_of_another_run_is_named(workers: WorkerPool, tmp_path: Path, line: BatchVersions, message: str) -> None:
    log = VersionLog(0, None)
    log.write_to(tmp_path)
    for iteration in range(6):
        log.write(BatchVersions(iteration, "actor.generate", max(0, iteration - 2)))
    log.write(line)
    with pytest.raises(WorkerFailure, match=message):
        run(workers, 2, APART, str(tmp_path / "run"), replay_versions=str(tmp_path))


def test_a_run_from_the_beginning_replaces_an_earlier_log(tmp_path: Path) -> None:
    for iterations in ((0, 1, 2), (0, 1)):
        log = VersionLog(0, None)
        log.write_to(tmp_path)
        for iteration in iterations:
            log.write(BatchVersions(iteration, "actor.generate", 0))
    resumed = VersionLog(0, None)
    resumed.write_to(tmp_path)
    resumed.write(BatchVersions(2, "actor.generate", 1))
    lines = [json.loads(line)["iteration"] for line in (tmp_path / "rank_0.jsonl").read_text().splitlines()]
    assert lines == [0, 1, 2]


def test_the_last_line_of_a_batch_counts(tmp_path: Path) -> None:
    log = VersionLog(3, None)
    log.write_to(tmp_path / "made")
    for begin in (1, 2):
        log.write(BatchVersions(5, "actor.generate", begin, [(7, 3)]))
    assert VersionLog(3, tmp_path / "made").replayed(5, "actor.generate") == BatchVersions(
        5, "actor.generate", 2, [(7, 3)]
    )
