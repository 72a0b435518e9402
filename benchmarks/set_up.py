"""Peak memory of building four models on four ranks, next to what each rank keeps, and their weights bit by bit.

PPO reads actor, critic, reference and reward from local files with the sizes of Llama 3.2 1B, in bfloat16. Every rank
of every layout compares its own weights with the files.

Run ``python -m benchmarks.set_up``. It needs 14 GB of memory and 5 GB in the temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkReport, make_parser
from benchmarks.ranks import answers_of_ranks

WORLD_SIZE = 4
LAYOUTS = ("fsdp4", "tp4", "fsdp2.tp2")
ROLES = ("actor", "critic", "reference", "reward")
PEAK_TARGET = 1.15
_OWN_FIELDS = ("RssAnon:", "RssShmem:")
"""Resident memory of the process itself. Pages of mapped files, which the system drops when it needs room, are not."""
_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of the models: those of Llama 3.2 1B."""

    vocabulary: int = 128_256
    hidden_size: int = 2048
    intermediate_size: int = 8192
    num_layers: int = 16
    num_heads: int = 32
    num_kv_heads: int = 8


@dataclass(frozen=True, slots=True)
class Reading:
    """Measurements of one rank; bytes over those before the first model was built."""

    rank: int
    seconds: float
    peak_bytes: int
    kept_bytes: int
    """Bytes of the weights and buffers that the rank holds after set-up."""
    largest_bytes: int
    """Bytes of the largest whole tensor of any model."""
    differing: tuple[str, ...]
    """Weights that differ from the files in any bit."""

    @property
    def ratio(self) -> float:
        """Peak over kept bytes and one tensor."""
        return self.peak_bytes / (self.kept_bytes + self.largest_bytes)


class PeakSampler:
    """Samples this process's own resident memory in a thread, until it is stopped."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._before = self.peak = _own_bytes()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(_PAUSE_S):
            self.peak = max(self.peak, _own_bytes())

    def stop(self) -> int:
        """Return the largest growth since the start."""
        self._stopped.set()
        self._thread.join()
        return self.peak - self._before


def _own_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(_OWN_FIELDS))


def make_config(work: Workload) -> Any:
    """Return the configuration of all four models."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=work.vocabulary, hidden_size=work.hidden_size, intermediate_size=work.intermediate_size,
        num_hidden_layers=work.num_layers, num_attention_heads=work.num_heads, num_key_value_heads=work.num_kv_heads,
        tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.num_labels = 1
    return config


def write_models(folder: Path, config: Any) -> dict[str, Path]:
    """Write a random language model and a random reward model, and return role -> folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "policy")
    AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "reward")
    return {role: folder / ("reward" if role == "reward" else "policy") for role in ROLES}


def measure(rank: int, sources: Mapping[str, Any], layout: str, answers: Connection) -> None:
    """Set up PPO in a layout on this rank, and send the measurements.

    Args:
        rank: This rank.
        sources: Role -> folder, or configuration of a new model.
        layout: Layout of all calls, without ranks.
        answers: Receives a `Reading`.
    """
    import lightning as L

    from benchmarks.workload import byte_tokenizer, make_trainer, random_prompts
    from lightning_realloc import PPO, ReallocStrategy

    class Watch(L.Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.sampler, self.began = PeakSampler(), time.perf_counter()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seconds, peak = time.perf_counter() - self.began, self.sampler.stop()
            answers.send(_read(rank, seconds, peak, trainer.strategy.pool, sources))
            trainer.should_stop = True

    actor, critic, reference, reward = (sources[role] for role in ROLES)
    module = PPO(actor, reward, critic=critic, reference=reference, tokenizer=byte_tokenizer())
    calls = dict.fromkeys(
        ("actor.generate", "reference.infer", "reward.infer", "critic.infer", "actor.train", "critic.train"),
        f"{layout}@0-{WORLD_SIZE - 1}",
    )
    strategy = ReallocStrategy(plan={"calls": calls})
    trainer = make_trainer(strategy=strategy, callbacks=[Watch()], max_steps=1, precision="bf16-true")
    trainer.fit(module, random_prompts(8, length=16, batch_size=8))


def _read(rank: int, seconds: float, peak: int, pool: Any, sources: Mapping[str, Any]) -> Reading:
    from lightning_realloc.runtime.parallel.shards import local_tensors

    kept = largest = 0
    differing: list[str] = []
    for role in pool.roles:
        home = pool.home(role)
        tensors = local_tensors(home.model)
        kept += sum(tensor.nbytes for tensor in (*tensors.values(), *home.model.buffers()))
        largest = max(largest, *(2 * param.numel for param in home.model_layout.model.params))
        if isinstance(sources[role], Path):
            differing += _differing(role, home.model_layout, tensors, sources[role], rank)
    return Reading(rank, seconds, peak, kept, largest, tuple(differing))


def _differing(role: str, placed: Any, tensors: Mapping[str, Any], folder: Path, rank: int) -> list[str]:
    from safetensors import safe_open

    found = []
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
        for name, tensor in tensors.items():
            if name not in stored:
                continue  # a new head
            weight = file.get_slice(name)
            for piece in placed.pieces(name, rank):
                source = tuple(map(slice, piece.region.starts, piece.region.stops))
                here = tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.region.shape, strict=True))
                if not weight[source].equal(tensor[here]):
                    found.append(f"{role}.{name}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Set up each layout once from files, and one with new weights, and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--layers", type=int, default=Workload().num_layers, help="layers of each model")
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, help="layouts of all calls; the first has both arms")
    options = parser.parse_args(arguments)
    work = Workload(num_layers=options.layers)
    report = BenchmarkReport("set_up", settings={"ranks": WORLD_SIZE, "dtype": "bfloat16"} | asdict(work))
    config = make_config(work)
    with tempfile.TemporaryDirectory() as folder:
        folders = write_models(Path(folder), config)
        for layout in options.layouts:
            report.add_row(source="files", layout=layout, **_set_up(folders, layout))
    first = options.layouts[0]
    report.add_row(source="new weights", layout=first, **_set_up(dict.fromkeys(ROLES, config), first))
    for row in report.rows:
        name = f"peak over kept bytes and the largest tensor, {row['source']}, {row['layout']}"
        report.require_at_most(name, row["ratio"], PEAK_TARGET)
    report.require_at_most("weights that differ from the files", sum(row["differing"] for row in report.rows), 0)
    return report.finish(options)


def _set_up(sources: Mapping[str, Any], layout: str) -> dict[str, float]:
    readings: list[Reading] = list(answers_of_ranks(measure, sources, layout, world_size=WORLD_SIZE))
    worst = max(readings, key=lambda reading: reading.ratio)
    return {
        "seconds": max(reading.seconds for reading in readings),
        "peak_gib": worst.peak_bytes / 2**30,
        "kept_gib": worst.kept_bytes / 2**30,
        "largest_gib": worst.largest_bytes / 2**30,
        "ratio": worst.ratio,
        "differing": sum(len(reading.differing) for reading in readings),
    }


if __name__ == "__main__":
    sys.exit(main())
