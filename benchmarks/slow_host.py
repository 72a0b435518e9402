"""A slow host among four: named at the start, avoided by the plan, and another one named that becomes slow later.

Each host is a network namespace with one rank. `SLOW` sends at a fraction of the others' rate. GRPO with a reference
runs once. `AutoTuner` measures passes, and then three plans take turns: the initial one, the best one by estimates for
equal links, and the best one by estimates for the measured links. Checked are: the warning names the slow host with its
figure, the last plan trains without it, and is faster than the others. At last a host that was fast becomes slow, and
`Timeline` has to name it.

Needs Linux, root and iproute2. Run ``python -m benchmarks.slow_host``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import gather_from_ranks
from lightning_realloc.layout import Layout
from tests.multinode.hosts import Host, Hosts, UnavailableError

NUM_HOSTS, SLOW, FALLEN = 4, 2, 3
RATE, SLOW_RATE = "1gbit", "50mbit"
COUNTED = 2
"""Measured iterations of a turn, after one that is not measured."""
PORT = 29500
LIMIT_S = 1500.0
"""Longest run."""
QUIET_STEPS, WAIT_STEPS = 8, 30
"""Iterations before a host becomes slow, and those in which the timeline has to name it."""


# --- one rank of four -------------------------------------------------------------------------------------------------


def run_rank(rounds: int, folder: Path) -> dict[str, Any]:
    """Tune, let plans take turns, and wait for the timeline's warning. Collective."""
    import lightning as L

    from benchmarks.workload import byte_tokenizer, random_prompts, share_of_vowels, stable_adam
    from lightning_realloc import GRPO, KL, AutoTuner, ReallocStrategy, SamplingParams, Timeline

    tuner = AutoTuner(
        save_to=None, profile_cache=None, max_overhead=1.0, search_seconds=2.0, profile_seconds=10.0,
        drift_threshold=None,
    )  # fmt: skip
    timeline = Timeline(folder / "record", predict=False, image_every_n_steps=None)
    found: dict[str, Any] = {"seconds": {}}
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=NUM_HOSTS, logger=False, enable_checkpointing=False, max_steps=400,
        enable_progress_bar=False, enable_model_summary=False, strategy=ReallocStrategy(), max_epochs=-1,
        callbacks=[tuner, _turns(tuner, rounds, folder, found), timeline],
    )  # fmt: skip
    module = GRPO(
        _config(), tokenizer=byte_tokenizer(), optimizer=stable_adam(1e-4), reward=share_of_vowels,
        kl=KL(0.01, estimator="k3", place="loss"), sampling=SamplingParams(n=4, max_new_tokens=16),
    )  # fmt: skip
    trainer.fit(module, random_prompts(8 * 64, length=8, batch_size=8))
    return found


def _turns(tuner: Any, rounds: int, folder: Path, found: dict[str, Any]) -> Any:
    """Return a callback that installs plans in turns after the tuning, then announces their end.

    Args:
        tuner: The run's AutoTuner.
        rounds: Turns of each plan.
        folder: Folder for the announcement.
        found: Gets the plans, and the seconds of their iterations.
    """
    from lightning.pytorch.callbacks import Callback

    class Turns(Callback):
        """After the tuning, installs plans in turns, then announces their end."""

        def __init__(self) -> None:
            self.plans: dict[str, Any] = {}
            self.queue: list[str] = []
            self.block: list[float] = []
            self.begin = 0.0
            self.steps_left = QUIET_STEPS + WAIT_STEPS

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.strategy.barrier()
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if not self.plans:
                if tuner.tuner.num_tunings:
                    self.start(trainer)
                return
            if not self.queue:
                self.steps_left -= 1
                if self.steps_left == WAIT_STEPS and trainer.is_global_zero:
                    (folder / "turns-over").touch()
                trainer.should_stop = self.steps_left == 0
                return
            self.block.append(time.perf_counter() - self.begin)
            if len(self.block) > COUNTED:
                everyone = gather_from_ranks(self.block[1:])
                self.block = []
                found["seconds"].setdefault(self.queue.pop(0), []).extend(map(max, zip(*everyone, strict=True)))
                if self.queue:
                    trainer.strategy.set_plan(self.plans[self.queue[0]])

        def start(self, trainer: Any) -> None:
            assert tuner.evaluator is not None, "the tuner did not search"
            initial, evaluator = tuner.tuner.start.plan, tuner.evaluator
            real = evaluator.propose(initial, seconds=2.0, seed=0)[0].plan
            blind = _best_for_equal_links(trainer, evaluator, initial)
            blind, real = trainer.strategy.broadcast((blind, real), 0)
            plans = {"initial": initial, "equal links": blind, "measured links": real}
            self.plans = {name: plan.to_mapping() for name, plan in plans.items()}
            found["committed"] = tuner.tuner.best.plan.to_mapping()
            found["plans"] = self.plans
            found["predicted"] = {name: evaluator.seconds(plan) for name, plan in plans.items()}
            self.queue = list(plans) * rounds
            trainer.strategy.set_plan(self.plans[self.queue[0]])

    return Turns()


def _config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def _best_for_equal_links(trainer: Any, evaluator: Any, start: Any) -> Any:
    """Return the best plan that is found if all links have the usual speed."""
    from lightning_realloc.tuning.shapes.lengths import Lengths

    placed = trainer.strategy._placed
    facts = placed.facts
    placed.facts = replace(facts, cluster=replace(facts.cluster, node_links=()))
    typical = evaluator.lengths
    count = typical.num_sequences
    responses = tuple(typical.responses[number % len(typical.responses)] for number in range(count))
    try:
        blind = trainer.strategy.plan_evaluator([Lengths((typical.prompt_tokens,) * count, responses)])
        return blind.propose(start, seconds=2.0, seed=0)[0].plan
    finally:
        placed.facts = facts


# --- all hosts --------------------------------------------------------------------------------------------------------


def measure(rounds: int, folder: Path) -> dict[str, Any]:
    """Run on four hosts, and return the results of the first rank with its log.

    Raises:
        UnavailableError: if this machine has no such hosts.
        RuntimeError: if a rank fails.
    """
    with Hosts(NUM_HOSTS, RATE) as hosts:
        hosts[SLOW].set_rate(SLOW_RATE)
        ranks = [_start(host, rank, hosts[0], rounds, folder) for rank, host in enumerate(hosts)]
        give_up_at, has_fallen = time.monotonic() + LIMIT_S, False
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"not done after {LIMIT_S:.0f} s; see {folder}")
            if not has_fallen and (folder / "turns-over").exists():
                hosts[FALLEN].set_rate(SLOW_RATE)
                has_fallen = True
            time.sleep(0.2)
        if any(rank.returncode for rank in ranks):
            raise RuntimeError("a rank failed:\n" + (folder / "rank0.log").read_text()[-4000:])
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer | {"log": (folder / "rank0.log").read_text()}


def _start(host: Host, rank: int, first: Host, rounds: int, folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.slow_host", "--rounds", str(rounds), "--folder", str(folder)]
    variables = {
        "RANK": str(rank), "LOCAL_RANK": "0", "NODE_RANK": str(rank), "WORLD_SIZE": str(NUM_HOSTS),
        "MASTER_ADDR": first.address, "MASTER_PORT": str(PORT), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with (folder / f"rank{rank}.log").open("w") as log:
        return host.start(command, log=log, variables=variables)


def fill(report: BenchmarkReport, found: Mapping[str, Any]) -> None:
    """Add a row for each plan, and the targets."""
    log, seconds = found["log"], {name: median(took) for name, took in found["seconds"].items()}
    for name, took in seconds.items():
        layouts = ", ".join(f"{call}: {layout}" for call, layout in _layouts(found["plans"][name]).items())
        report.add_row(plan=name, measured_s=took, predicted_s=found["predicted"][name], layouts=layouts)
    named = re.search(rf"slow host: host{SLOW} sends at ([0-9.e+-]+) GB/s", log)
    rate = float(named[1]) * 8 if named else 0.0
    report.require_at_most("error of the slow host's figure, Gb/s over its rate", abs(rate / 0.05 - 1), 0.3)
    fastest_other = min(seconds["initial"], seconds["equal links"])
    trains_on = Layout.parse(_layouts(found["plans"]["measured links"])["actor.train"]).ranks
    report.require_at_most("plan of measured links: training ranks on the slow host", float(SLOW in trains_on), 0.0)
    over = seconds["measured links"] / fastest_other
    report.require_at_most("plan of measured links over the faster of the others", over, 1.0)
    is_named = f"links of host{FALLEN} have become slow since the start" in log
    report.require_at_most("hosts that became slow and were not named", float(not is_named), 0.0)


def _layouts(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return call -> its layout."""
    return {call: one if isinstance(one, str) else one["layout"] for call, one in plan["calls"].items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trial and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every plan")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder is not None:
        answer = run_rank(options.rounds, options.folder)
        if os.environ["RANK"] == "0":
            (options.folder / "answer.json").write_text(json.dumps(answer))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that the hosts are removed
    settings = {"rounds": options.rounds, "rate": RATE, "slow_rate": SLOW_RATE}
    report = BenchmarkReport("slow_host", settings=settings)
    with tempfile.TemporaryDirectory(prefix="slow-host-") as folder:
        try:
            found = measure(options.rounds, Path(folder))
        except UnavailableError as error:
            sys.stderr.write(f"not measured: {error}\n")
            return 1
    fill(report, found)
    report.settings["found"] = {name: value for name, value in found.items() if name != "log"}
    said = [line for line in found["log"].splitlines() if "slow" in line]
    sys.stderr.write("\n".join(said) + "\n")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
