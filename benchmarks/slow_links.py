"""Layouts of training over two nodes with fast and slow links, and the layout that the tuner chooses.

Each node is a network namespace with one rank, and sends at a limited rate. A small Llama is fine-tuned in every layout
that the two ranks have, with the usual micro-batches and with those of a quarter step, in turns within one run. Before
that, `AutoTuner` measures the link and the model, and chooses a plan. Two things are checked: of ``pp2``, ``tp2`` and
``fsdp2`` it predicts the fastest, and the plan that it commits has the layout that is fastest of all, up to noise.

Needs Linux, root and iproute2. Run ``python -m benchmarks.slow_links``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from benchmarks.ranks import gather_from_ranks
from tests.multinode.hosts import Host, Hosts, UnavailableError

LAYOUTS = ("pp2", "tp2", "fsdp2", "dp2")
"""Layouts to measure. The first three divide weights, and so train models that do not fit on one rank."""
DIVIDED = LAYOUTS[:3]
COUNTED = 3
"""Measured iterations of a block, after one that is not measured."""
NOISE = 1.1
"""Seconds over those of the fastest layout, up to which two layouts count as equally fast."""
PORT = 29500
LIMIT_S = 600.0
"""Longest run of a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One link, one model and one batch."""

    name: str
    rate: str
    """Bandwidth at which each node sends, in `tc`'s units."""
    burst: str = "64k"
    """Bytes that each may send at once after a pause, in `tc`'s units."""
    hidden_size: int
    num_layers: int
    num_rows: int
    """Sequences of an optimizer step."""
    row_tokens: int
    num_heads: int = 4
    vocabulary: int = 512


CASES = (
    Case(
        name="fast link, one row", rate="10gbit", burst="2m", hidden_size=256, num_layers=6, num_rows=1, row_tokens=512
    ),
    Case(name="slow link, few tokens", rate="100mbit", hidden_size=256, num_layers=8, num_rows=8, row_tokens=64),
    Case(name="slow link, one row", rate="100mbit", hidden_size=256, num_layers=6, num_rows=1, row_tokens=512),
    Case(name="slow link, many tokens", rate="100mbit", hidden_size=64, num_layers=2, num_rows=64, row_tokens=128),
)


def plans_of(case: Case) -> dict[str, dict[str, Any]]:
    """Return the plans to measure: every layout with the usual micro-batches, and with those of a quarter step."""
    few = max(case.row_tokens, case.num_rows * case.row_tokens // 4)
    plans: dict[str, dict[str, Any]] = {}
    for layout in LAYOUTS:
        for tokens in {None: None, few: few} if case.num_rows > 1 else {None: None}:
            options = {} if tokens is None else {"micro_batch_tokens": tokens}
            plans[f"{layout} {tokens or 'default'}"] = {"calls": {"actor.train": {"layout": layout, **options}}}
    return plans


# --- one rank of two --------------------------------------------------------------------------------------------------


def run_rank(case: Case, rounds: int) -> dict[str, Any]:
    """Tune, and measure all plans in turns. Collective."""
    be_quiet()
    begin = time.perf_counter()
    tuned = _tune(case)
    tuned["tuning_s"] = time.perf_counter() - begin
    plans = plans_of(case) | {"committed": tuned["committed"]}
    seconds = _take_turns(case, list(plans.values()), rounds)
    return tuned | {"seconds": dict(zip(plans, seconds, strict=True))}


def _fit(case: Case, plan: Mapping[str, Any], callback: Any, *others: Any, steps: int) -> None:
    """Fine-tune a random Llama on random letters."""
    import lightning as L

    from benchmarks.workload import byte_tokenizer, random_texts, stable_adam
    from lightning_realloc import SFT, ReallocStrategy, SFTDataModule

    half = case.row_tokens // 2
    texts = random_texts(2 * case.num_rows, length=half, seed=1)
    rows = [
        {"prompt": texts[2 * n], "completion": texts[2 * n + 1][:-1]} for n in range(case.num_rows)
    ] * steps  # the completion gets an end-of-sequence token
    module = SFT(
        _config(case), tokenizer=byte_tokenizer(), optimizer=stable_adam(1e-4),
    )  # fmt: skip
    trainer = L.Trainer(
        accelerator="cpu", devices=1, num_nodes=2, logger=False, enable_checkpointing=False, max_steps=steps,
        enable_progress_bar=False, enable_model_summary=False, strategy=ReallocStrategy(plan=plan),
        callbacks=[*others, callback], max_epochs=-1,
    )  # fmt: skip
    trainer.fit(module, SFTDataModule(rows, batch_size=case.num_rows, shuffle=False))


def _config(case: Case) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.hidden_size, intermediate_size=3 * case.hidden_size,
        num_hidden_layers=case.num_layers, num_attention_heads=case.num_heads, num_key_value_heads=case.num_heads,
        max_position_embeddings=2 * case.row_tokens, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip


def _tune(case: Case) -> dict[str, Any]:
    """Return the committed plan, and the predicted seconds of the plans to measure."""
    from lightning.pytorch.callbacks import Callback

    from lightning_realloc import AutoTuner
    from lightning_realloc.dataflow.execution_plan import ExecutionPlan

    tuner = AutoTuner(save_to=None, profile_cache=None, max_overhead=1.0, search_seconds=1.0, profile_seconds=10.0)

    class StopAfterCommit(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.should_stop = tuner.tuner.num_tunings > 0

    plans = plans_of(case)
    _fit(case, plans["fsdp2 default"], StopAfterCommit(), tuner, steps=100)
    evaluator = tuner.evaluator
    assert evaluator is not None, "the tuner did not search"
    cluster = evaluator.task.cluster
    parsed = {name: ExecutionPlan.from_mapping(plan) for name, plan in plans.items()}
    return {
        "has_profile": tuner.has_profile,
        "bytes_per_s": cluster.inter_node_bytes_per_s,
        "latency_s": cluster.inter_node_latency_s,
        "predicted": {name: evaluator.seconds(plan) for name, plan in parsed.items()},
        "committed": tuner.tuner.best.plan.to_mapping(),
        "trials": [trial.to_mapping() for trial in tuner.tuner.trials],
    }


def _take_turns(case: Case, plans: Sequence[Mapping[str, Any]], rounds: int) -> list[list[float]]:
    """Return seconds of iterations under each plan, with the plans in turns in one run. Collective."""
    from lightning.pytorch.callbacks import Callback

    queue = [index for _ in range(rounds) for index in range(len(plans))]
    seconds: list[list[float]] = [[] for _ in plans]

    class Turns(Callback):
        def __init__(self) -> None:
            self.block: list[float] = []
            self.begin = 0.0

        def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
            trainer.strategy.barrier()
            self.begin = time.perf_counter()

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.block.append(time.perf_counter() - self.begin)
            if len(self.block) <= COUNTED:
                return
            everyone = gather_from_ranks(self.block[1:])
            self.block = []
            seconds[queue.pop(0)] += map(max, zip(*everyone, strict=True))
            if queue:
                trainer.strategy.set_plan(plans[queue[0]])
            else:
                trainer.should_stop = True

    _fit(case, plans[0], Turns(), steps=len(queue) * (COUNTED + 1) + 1)
    return seconds


# --- both nodes -------------------------------------------------------------------------------------------------------


def measure(case: Case, rounds: int, folder: Path) -> dict[str, Any]:
    """Run a case on two nodes, and return the results of the first rank.

    Raises:
        UnavailableError: if this machine has no such nodes.
        RuntimeError: if a rank fails.
    """
    with Hosts(2, case.rate, case.burst) as hosts:
        ranks = [_start(host, rank, hosts[0], case, rounds, folder) for rank, host in enumerate(hosts)]
        give_up_at = time.monotonic() + LIMIT_S
        while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
            if time.monotonic() > give_up_at:
                raise RuntimeError(f"{case.name}: not done after {LIMIT_S:.0f} s")
            time.sleep(0.1)
        if any(rank.returncode for rank in ranks):
            raise RuntimeError(f"{case.name}: a rank failed:\n" + (folder / "rank0.log").read_text()[-4000:])
    answer: dict[str, Any] = json.loads((folder / "answer.json").read_text())
    return answer


def _start(
    host: Host, rank: int, first: Host, case: Case, rounds: int, folder: Path
) -> subprocess.Popen[str]:  # fmt: skip
    number = str(CASES.index(case))
    command = [sys.executable, "-m", "benchmarks.slow_links", "--rounds", str(rounds), "--rank-of", number, str(folder)]
    variables = {
        "RANK": str(rank), "LOCAL_RANK": "0", "NODE_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": first.address,
        "MASTER_PORT": str(PORT), "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip
    with (folder / f"rank{rank}.log").open("w") as log:
        return host.start(command, log=log, variables=variables)


def fill(report: BenchmarkReport, case: Case, found: Mapping[str, Any]) -> None:
    """Add a row for each layout, and the targets."""
    entry = found["committed"]["calls"]["actor.train"]
    committed = str(entry if isinstance(entry, str) else entry["layout"]).partition("@")[0]
    seconds = {name: median(took) for name, took in found["seconds"].items()}
    seconds[f"{committed} committed"] = seconds.pop("committed")
    measured, predicted = _best_by_layout(seconds), _best_by_layout(found["predicted"])
    for layout in LAYOUTS:
        report.add_row(
            case=case.name, layout=layout, measured_s=measured[layout], predicted_s=predicted[layout],
            committed=layout == committed, link_mb_per_s=found["bytes_per_s"] / 1e6,
        )  # fmt: skip
    chosen, fastest = (min(DIVIDED, key=of.__getitem__) for of in (predicted, measured))
    over = measured[chosen] / measured[fastest]
    report.require_at_most(f"{case.name}: predicted {chosen}, measured {fastest}", over, NOISE)
    over = measured[committed] / min(measured.values())
    report.require_at_most(f"{case.name}: committed {committed} over the fastest", over, NOISE)


def _best_by_layout(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of each layout under the fastest of its plans."""
    return {one: min(s for name, s in seconds.items() if name.startswith(f"{one} ")) for one in LAYOUTS}


def main(arguments: list[str] | None = None) -> int:
    """Run all cases and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3, help="turns of every plan")
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="numbers of cases")
    parser.add_argument("--rank-of", nargs=2, metavar=("CASE", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank_of is not None:
        case, folder = CASES[int(options.rank_of[0])], Path(options.rank_of[1])
        answer = run_rank(case, options.rounds)
        if os.environ["RANK"] == "0":
            (folder / "answer.json").write_text(json.dumps(answer))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that the nodes are removed
    report = BenchmarkReport("slow_links", settings={"rounds": options.rounds, "noise": NOISE}, group_by="case")
    for number in options.cases:
        with tempfile.TemporaryDirectory(prefix="slow-links-") as folder:
            try:
                found = measure(CASES[number], options.rounds, Path(folder))
            except UnavailableError as error:
                sys.stderr.write(f"not measured: {error}\n")
                return 1
        fill(report, CASES[number], found)
        report.settings[CASES[number].name] = found
        report.write(options.json)
        sys.stderr.write(f"{CASES[number].name}: {found['tuning_s']:.0f} s for tuning\n")
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
