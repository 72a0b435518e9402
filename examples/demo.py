"""GRPO from scratch on four CPU ranks: ``python -m examples.demo``. No network, no GPU.

A tiny Llama first imitates demonstrations, most of them wrong, and then learns right answers from rewards. Lightning
starts this script again for each of the ranks 1-3; only the first process writes files and output.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from examples import report, sorting
from examples.recorder import Recorder, Recording, mean_seconds
from lightning_realloc import (
    GRPO,
    SFT,
    PromptDataModule,
    ReallocStrategy,
    RolloutTable,
    SamplingParams,
    SaveHuggingFace,
    SFTDataModule,
    Timeline,
    TrainOptions,
    exact_match,
)

RECORDING = "recording.json"
"""Name of the file with the figures of all iterations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the demo. Batch sizes count all ranks together."""

    folder: Path = Path("runs/demo")
    seed: int = 0
    num_ranks: int = 4

    # Warm-up on demonstrations, most of them sorted from z to a.
    num_demonstrations: int = 12_800
    right_demonstrations: float = 0.3
    demonstrations_per_step: int = 64
    warm_up_epochs: int = 4
    warm_up_learning_rate: float = 4e-3
    warm_up_layout: str = "dp4"

    # Learning from rewards.
    num_prompts: int = 480
    epochs: int = 4
    prompts_per_iteration: int = 32
    responses_per_prompt: int = 8
    steps_per_iteration: int = 2
    learning_rate: float = 5e-4
    kl_coef: float = 0.02
    max_new_tokens: int = 10
    num_held_out: int = 256

    # Layout of each call; the actor's weights move before every rollout.
    generate_layout: str = "dp2.tp2"
    infer_layout: str = "dp4"
    train_layout: str = "fsdp4"

    engine: Literal["native", "vllm"] = "native"

    # Where the ranks run: processes of this machine, or actors of a Ray cluster.
    launcher: Literal["popen", "spawn", "ray"] = "popen"
    num_nodes: int = 1
    max_failures: int = 0

    @property
    def plan(self) -> dict[str, dict[str, str]]:
        """The execution plan of GRPO."""
        layouts = {
            "actor.generate": self.generate_layout,
            "reference.infer": self.infer_layout,
            "actor.train": self.train_layout,
        }
        if self.engine == "vllm":  # ratios are to the actor's own log-probabilities, which this call computes
            layouts["actor.infer"] = self.infer_layout
        return {"calls": layouts}

    @property
    def num_iterations(self) -> int:
        """Iterations of GRPO."""
        return self.epochs * (self.num_prompts // self.prompts_per_iteration)

    @property
    def warm_up_steps(self) -> int:
        """Optimizer steps of the warm-up."""
        return self.warm_up_epochs * (self.num_demonstrations // self.demonstrations_per_step)

    def path(self, name: str) -> str:
        """Return the path of a file or folder of the run."""
        return str(self.folder / name)


def main() -> None:
    """Run the demo with the settings of the command line."""
    settings, prepare_only = read_arguments()
    run(settings, prepare_only=prepare_only)


def run(settings: Settings, *, prepare_only: bool = False) -> None:
    """Run every stage; called in every process."""
    began = time.perf_counter()
    report.silence_hints()
    if report.is_first_process():
        write_files(settings)
    warm_up(settings)
    if not prepare_only:
        outcome = learn_from_rewards(settings)
        if report.is_first_process():
            conclude(settings, outcome, wall_s=time.perf_counter() - began)


def write_files(settings: Settings) -> None:
    """Write JSONL files and a model with random weights."""
    report.heading(f"1/3  Writing prompts, demonstrations and a random model to {settings.folder}/")
    settings.folder.mkdir(parents=True, exist_ok=True)
    for name in ("logs", "checkpoints"):  # of an earlier run
        shutil.rmtree(settings.folder / name, ignore_errors=True)
    rng = random.Random(settings.seed)
    num_prompts = settings.num_prompts
    words = iter(sorting.random_words(num_prompts + settings.num_held_out + settings.num_demonstrations, rng))
    for name, count in (("train", num_prompts), ("held_out", settings.num_held_out)):
        sorting.write_jsonl(settings.folder / f"{name}.jsonl", [sorting.problem(next(words)) for _ in range(count)])
    demonstrations = [sorting.demonstration(word, right=rng.random() < settings.right_demonstrations) for word in words]
    sorting.write_jsonl(settings.folder / "demonstrations.jsonl", demonstrations)

    torch.manual_seed(settings.seed)
    heads = {"head_dim": 32} if settings.engine == "vllm" else {}  # the smallest that vLLM has on CPU
    LlamaForCausalLM(sorting.tiny_llama(**heads)).save_pretrained(settings.path("random"))
    sorting.byte_tokenizer().save_pretrained(settings.path("random"))


def warm_up(settings: Settings) -> None:
    """Train on the demonstrations, and write the model to ``warm``."""
    report.heading(f"2/3  Warm-up: {settings.warm_up_steps} steps of SFT")
    report.say(
        f"The demonstrators disagree: {settings.right_demonstrations:.0%} sort from a to z, which is right, the others "
        "from z to a. Imitating them teaches the model to sort, but not which way round."
    )
    model = SFT(
        settings.path("random"),
        learning_rate=settings.warm_up_learning_rate,
        lr_scheduler=falling_to_zero(settings.warm_up_steps),
        seed=settings.seed,
    )
    data = SFTDataModule(
        settings.path("demonstrations.jsonl"), batch_size=settings.demonstrations_per_step, seed=settings.seed
    )
    strategy = make_strategy(settings, {"calls": {"actor.train": settings.warm_up_layout}})
    save = SaveHuggingFace(settings.path("warm"))
    trainer = make_trainer(settings, "warm_up", strategy, [save], max_epochs=settings.warm_up_epochs)
    trainer.fit(model, data)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of learning from rewards."""

    reward_before: float
    """Fraction of held-out prompts answered right, one response sampled for each."""
    reward_after: float
    """The same fraction with the trained actor."""
    checkpoint: str
    """Path of the checkpoint to resume from."""


def learn_from_rewards(settings: Settings, further: Sequence[Callback] = ()) -> Outcome:
    """Train with GRPO and further callbacks, and write the actor to ``trained``."""
    report.heading(f"3/3  GRPO: {settings.num_iterations} iterations on {settings.num_ranks} ranks")
    report.say("Each iteration samples answers, scores them under the warm-up model (for KL), and trains on rewards.")
    model, data = make_grpo(settings), make_prompts(settings)
    recorder = Recorder(settings.path(RECORDING))
    checkpoint = ModelCheckpoint(settings.path("checkpoints"), filename="last", enable_version_counter=False)
    shown = [Timeline(), RolloutTable(every_n_steps=5)]
    callbacks = [recorder, checkpoint, SaveHuggingFace(settings.path("trained")), *shown, *further]
    strategy = make_strategy(settings, settings.plan)
    trainer = make_trainer(settings, "grpo", strategy, callbacks, max_epochs=settings.epochs)
    (before,) = trainer.validate(model, data, verbose=False)
    trainer.fit(model, data)  # validates at the end of each epoch
    after = float(trainer.callback_metrics["val/reward"])
    return Outcome(before["val/reward"], after, checkpoint.best_model_path)


def make_grpo(settings: Settings, make: Callable[..., GRPO] = GRPO) -> GRPO:
    """Return the algorithm, with a small learning rate, and little KL since the warm-up model is mostly wrong."""
    return make(
        settings.path("warm"),
        exact_match,
        sampling=SamplingParams(n=settings.responses_per_prompt, max_new_tokens=settings.max_new_tokens),
        evaluation_sampling=SamplingParams(n=1, max_new_tokens=settings.max_new_tokens),
        learning_rate=settings.learning_rate,
        lr_scheduler=falling_to_zero(settings.num_iterations),
        kl_coef=settings.kl_coef,
        train_options=TrainOptions(num_minibatches=settings.steps_per_iteration),
        engine=settings.engine,
        seed=settings.seed,
    )


def make_prompts(settings: Settings) -> PromptDataModule:
    """Return the prompts for training and for evaluation."""
    return PromptDataModule(
        settings.path("train.jsonl"),
        val_data=settings.path("held_out.jsonl"),
        batch_size=settings.prompts_per_iteration,
        seed=settings.seed,
    )


def make_strategy(settings: Settings, plan: dict[str, dict[str, str]]) -> ReallocStrategy:
    """Return the strategy that runs a plan on this machine or on a Ray cluster."""
    return ReallocStrategy(plan=plan, launcher=settings.launcher, max_failures=settings.max_failures)


def make_trainer(
    settings: Settings, name: str, strategy: ReallocStrategy, callbacks: list[Callback], *, max_epochs: int
) -> L.Trainer:
    """Return a trainer on CPU ranks that writes its curves to ``logs/name``."""
    return L.Trainer(
        accelerator="cpu",
        devices=settings.num_ranks // settings.num_nodes,
        num_nodes=settings.num_nodes,
        strategy=strategy,
        max_epochs=max_epochs,
        logger=CSVLogger(settings.folder, name="logs", version=name),
        callbacks=[report.Progress(), *callbacks],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_model_summary=False,
    )


def falling_to_zero(num_steps: int) -> Callable[[Optimizer], LinearLR]:
    """Return a function that gives an optimizer a learning rate that falls to zero."""
    return partial(LinearLR, start_factor=1.0, end_factor=0.0, total_iters=num_steps)


def conclude(settings: Settings, outcome: Outcome, *, wall_s: float) -> None:
    """Write ``summary.json`` and show it as tables."""
    recording = Recording.from_dict(json.loads((settings.folder / RECORDING).read_text()))
    summary_path = settings.folder / "summary.json"
    summary_path.write_text(json.dumps(summarize(settings, outcome, recording, wall_s=wall_s), indent=2) + "\n")
    report.heading(f"Done in {wall_s:.0f} s")
    report.show_rewards(outcome.reward_before, outcome.reward_after, settings.num_held_out)
    report.show_examples(compare_answers(settings))
    report.show_iterations(recording.iterations)
    layouts = settings.plan["calls"]
    report.show_switches(recording, {call: f"{settings.train_layout} → {layouts[call]}" for call in layouts})
    report.show_lines(
        "Files",
        {
            "Checkpoint, to resume from": outcome.checkpoint,
            "Trained actor, for from_pretrained": settings.path("trained"),
            "Figures": str(summary_path),
            "Curves": settings.path("logs/grpo/metrics.csv"),
        },
    )
    report.show_lines(
        "Next",
        {
            "See how it learned, in a browser": report.command_line("report", str(settings.folder)),
            "Ask the trained actor, such as: sort dcba:": report.command_line("chat", settings.path("trained")),
        },
    )


def summarize(settings: Settings, outcome: Outcome, recording: Recording, *, wall_s: float) -> dict[str, Any]:
    """Return the figures of the run, ready for JSON."""
    switches = recording.switches
    return {
        "world_size": settings.num_ranks,
        "seed": settings.seed,
        "reward_before": outcome.reward_before,
        "reward_after": outcome.reward_after,
        "reward_by_iteration": [iteration.reward for iteration in recording.iterations],
        "seconds_per_call": mean_seconds(recording.iterations),
        "reallocation": {
            "bytes_moved": sum(switch.bytes_moved for switch in switches),
            "bytes_minimum": sum(switch.bytes_minimum for switch in switches),
            "seconds": sum(switch.seconds for switch in switches),
            "switches": [asdict(switch) for switch in switches],
        },
        "plan": settings.plan["calls"],
        "checkpoint": outcome.checkpoint,
        "trained_model": settings.path("trained"),
        "warm_up_steps": settings.warm_up_steps,
        "iterations": settings.num_iterations,
        "wall_seconds": wall_s,
        "versions": {name: version(name) for name in ("torch", "lightning", "transformers", "lightning-realloc")},
    }


def compare_answers(settings: Settings, *, num_rows: int = 5) -> list[tuple[str, str, str, str]]:
    """Return held-out prompts, right answers, and answers of both written models by transformers."""
    rows = sorting.read_jsonl(settings.folder / "held_out.jsonl")[:num_rows]
    prompts = [row["prompt"] for row in rows]
    before, after = (greedy_answers(settings.path(name), prompts) for name in ("warm", "trained"))
    return [(row["prompt"], row["answer"], *answers) for row, *answers in zip(rows, before, after, strict=True)]


def greedy_answers(folder: str, prompts: list[str]) -> list[str]:
    """Return the greedy answer to every prompt, of a model that ``from_pretrained`` reads."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    answers = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**ids, do_sample=False, max_new_tokens=10)
        answers.append(tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def read_arguments() -> tuple[Settings, bool]:
    """Return the settings, and whether to stop when the model is warmed up."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo", description=__doc__, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--seed", type=int, help="of data, weights and sampling")
    parser.add_argument("--folder", type=Path, help="where everything is written")
    parser.add_argument("--engine", choices=("native", "vllm"), help="vllm: needs `make vllm-env` and VLLM_PYTHON")
    parser.add_argument("--launcher", choices=("popen", "spawn", "ray"), help="ray: ranks are actors of a Ray cluster")
    parser.add_argument("--num-nodes", type=int, help="machines of the Ray cluster, which share the four ranks")
    parser.add_argument("--max-failures", type=int, help="lost ranks or machines that a run on Ray survives")
    parser.add_argument("--epochs", type=int, help="passes over the prompts, of 15 iterations each")
    parser.add_argument("--prepare-only", action="store_true", help="stop when data and warmed-up model are written")
    given = vars(parser.parse_args())
    prepare_only = given.pop("prepare_only", False)
    if given.get("engine") == "vllm":
        given["generate_layout"] = "dp1@0"  # one process with vLLM; it needs whole weights
    return Settings(**given), prepare_only


if __name__ == "__main__":
    main()
