"""Learning check of every algorithm on a tiny task, with default settings.

A model that writes random letters learns to write vowels: from rewards, pairs, labels, demonstrations or a teacher.
Classifiers learn to recognise vowels. The table has each algorithm's score before and after, and targets for the mean
over the seeds.

These settings are not defaults: the learning rate, since defaults suit pretrained weights; lengths, batches and seeds;
and the settings of published variants. Every policy learns from the same number of responses a step, however many of
them answer one prompt. Tests check the formulas; this benchmark checks that training with them improves the score.
`benchmarks.learning` compares with TRL.

Run ``python -m benchmarks.learners``.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean
from typing import Any, get_args

from benchmarks.harness import BenchmarkReport, be_quiet, make_parser
from benchmarks.learning_task import Task, pair, prompt, response, save_model
from benchmarks.workload import make_trainer, share_of_vowels

LEARNING_RATE = 1e-3
PREFERENCE_RATE = 2e-4
"""Learning rate of policies that learn from given pairs and labels. With the other rate they memorise a few pairs."""
LAST_STEPS = 5
"""Last steps whose mean is the final score of a policy."""
LEAST_REWARD, LEAST_ACCURACY, MOST_NATS, MOST_DIVERGENCE = 0.4, 0.7, 2.2, 0.1
"""Targets. Before training the reward is 0.2, accuracies at most 0.5, the loss 3.3 nats a letter, and divergences 0.3
(js) to 2."""
_HELD_OUT = "val/"
_GRADIENTS = ("actor/grad_norm", "reward/grad_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Amount of data and training for each learner."""

    task: Task
    steps: int
    responses: int
    """Responses per step of a policy."""
    rows: int
    """Rows per step of the other learners: pairs, labels or demonstrations."""
    num_held_out: int


FULL = Size(
    task=Task(hidden_size=64, num_layers=2, warm_up_steps=80, prompt_lengths=(4, 8), mean_response=10, new_tokens=24),
    steps=40, responses=64, rows=24, num_held_out=128,
)  # fmt: skip
QUICK = Size(
    task=Task(hidden_size=16, num_layers=1, num_heads=2, warm_up_steps=2, prompt_lengths=(2, 3), mean_response=4,
              new_tokens=6),
    steps=2, responses=8, rows=4, num_held_out=4,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """One algorithm, with its score and target."""

    make: Callable[[str, Size, int], tuple[Any, Any]]
    """Function of the model's folder, the size and the seed that returns a module and its data."""
    metric: str
    """Metric of the score: per step, or with ``val/`` on held-out rows before and after training."""
    reach: float
    """Score that the mean of all seeds must reach."""
    falls: bool = False
    """Whether lower scores are better."""


# --- data -------------------------------------------------------------------------------------------------------------


def _rows(size: Size, seed: int, row: Callable[[random.Random], dict[str, Any]], per_step: int) -> list[dict[str, Any]]:
    rng = random.Random(f"rows {seed}")
    return [row(rng) for _ in range(size.steps * per_step)]


def _held_out(size: Size, row: Callable[[random.Random], dict[str, Any]]) -> list[dict[str, Any]]:
    rng = random.Random("held out")
    return [row(rng) for _ in range(size.num_held_out)]


def _demonstration(task: Task, rng: random.Random) -> dict[str, Any]:
    vowels = "".join(rng.choices("aeiou", k=len(response(task, rng))))
    return {"prompt": prompt(task, rng), "completion": vowels}


def _judged(task: Task, rng: random.Random) -> dict[str, Any]:
    row, label = pair(task, rng), rng.random() < 0.5
    return {"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label}


def _steps(task: Task, rng: random.Random) -> dict[str, Any]:
    """Return three steps of two letters; right steps end in a vowel."""
    labels = [rng.random() < 0.5 for _ in range(3)]
    ends = [rng.choice("aeiou" if label else "bcdfghjklmnpqrstvwxyz") for label in labels]
    return {
        "prompt": prompt(task, rng),
        "completions": [rng.choice("abcdefgh") + end for end in ends],
        "labels": labels,
    }


# --- learners ---------------------------------------------------------------------------------------------------------


def _policy(name: str, n: int, folder: str, size: Size, seed: int, **settings: Any) -> tuple[Any, Any]:
    import lightning_realloc as package

    task, num_prompts = size.task, size.responses // n
    sampling = package.SamplingParams(n=n, max_new_tokens=task.new_tokens)
    sources = (folder, folder + "-teacher") if name == "OnPolicyDistillation" else (folder, share_of_vowels)
    module = getattr(package, name)(*sources, sampling=sampling, learning_rate=LEARNING_RATE, seed=seed, **settings)
    rows = _rows(size, seed, lambda rng: {"prompt": prompt(task, rng)}, num_prompts)
    return module, package.PromptDataModule(rows, batch_size=num_prompts, shuffle=False)


_DATA: Mapping[str, tuple[str, Callable[[Task, random.Random], dict[str, Any]]]] = {
    "SFT": ("SFTDataModule", _demonstration),
    "KTO": ("BinaryFeedbackDataModule", _judged),
    "ProcessReward": ("StepDataModule", _steps),
    **dict.fromkeys(("DPO", "ORPO", "RewardModel"), ("PreferenceDataModule", pair)),
}


def _given(name: str, folder: str, size: Size, seed: int, **settings: Any) -> tuple[Any, Any]:
    import lightning_realloc as package

    data, row = _DATA[name]
    make = partial(row, size.task)
    rate = PREFERENCE_RATE if name in ("DPO", "KTO", "ORPO") else LEARNING_RATE
    module = getattr(package, name)(folder, learning_rate=rate, seed=seed, **settings)
    rows = {"val_data": _held_out(size, make), "batch_size": size.rows, "shuffle": False}
    return module, getattr(package, data)(_rows(size, seed, make, size.rows), **rows)


def _policies() -> dict[str, Learner]:
    from lightning_realloc import GAE, Cispo, Clip, DynamicSampling

    def learner(name: str, n: int, **settings: Any) -> Learner:
        metric = settings.pop("metric", "reward")
        return Learner(make=partial(_policy, name, n, **settings), metric=metric, reach=LEAST_REWARD)

    return {
        "GRPO": learner("GRPO", 8, kl_coef=0.04, loss_average="sequence"),
        "Dr. GRPO": learner("GRPO", 8, advantages="group_mean", loss_average="constant"),
        "DAPO": learner("GRPO", 8, policy_loss=Clip(high=0.28), dynamic_sampling=DynamicSampling()),
        "GSPO": learner(
            "GRPO", 8, ratio_level="sequence", loss_average="sequence", policy_loss=Clip(low=3e-4, high=4e-4)
        ),
        "CISPO": learner("GRPO", 8, policy_loss=Cispo(high=4.0)),
        "SAPO": learner("GRPO", 8, policy_loss="sapo", kl_coef=0.04, loss_average="sequence"),
        "LUSPO": learner("GRPO", 8, ratio_level="sequence", kl_coef=0.04, loss_average="sum"),
        "VESPO": learner("GRPO", 8, policy_loss="vespo", kl_coef=0.04),
        "RLOO": learner("RLOO", 4),
        "REINFORCE++": learner("ReinforcePlusPlus", 1),
        "REINFORCE++, group": learner("ReinforcePlusPlus", 8, baseline="group"),
        "ReMax": learner("ReMax", 1),
        "RLOO, kl_coef=0": learner("RLOO", 4, kl_coef=0.0),
        "ReMax, kl_coef=0": learner("ReMax", 1, kl_coef=0.0),
        "PPO, kl_coef=0": learner("PPO", 1, metric="score", kl_coef=0.0),
        "best of n": learner("BestOfN", 8, metric="reward_of_all"),
        "online DPO": learner("OnlineDPO", 2, metric="reward_of_all"),
        "PPO": learner("PPO", 1, metric="score"),
        "PPO, normalize_values": learner("PPO", 1, metric="score", advantages=GAE(normalize_values=True)),
    }  # fmt: skip


def _from_teachers() -> dict[str, Learner]:
    kinds = ("sampled", "reverse_kl", "forward_kl", "js")
    metrics = {kind: "actor/reverse_kl" if kind == "sampled" else f"actor/{kind}" for kind in kinds}
    return {
        f"distillation, {kind}": Learner(
            make=partial(_policy, "OnPolicyDistillation", 1, divergence=kind), metric=metrics[kind],
            reach=MOST_DIVERGENCE, falls=True,
        )
        for kind in kinds
    }  # fmt: skip


def _from_rows() -> dict[str, Learner]:
    from lightning_realloc.algorithms.losses.preference_losses import PairLossName

    def learner(name: str, metric: str, reach: float, *, falls: bool = False, **settings: Any) -> Learner:
        return Learner(make=partial(_given, name, **settings), metric=f"{_HELD_OUT}{metric}", reach=reach, falls=falls)

    needed = {"exo_pair": {"label_smoothing": 1e-3}, "robust": {"label_smoothing": 0.1}}
    needed |= {"discopop": {"discopop_tau": 0.2}}  # with a smaller one the loss first rises: docs/preferences.md
    pairwise = {
        f"DPO, {loss}": learner("DPO", "accuracy", LEAST_ACCURACY, loss=loss, **needed.get(loss, {}))
        for loss in get_args(PairLossName)
    }
    return {
        "SFT": learner("SFT", "loss", MOST_NATS, falls=True),
        **pairwise,
        "DPO, sigmoid and sft": learner("DPO", "accuracy", LEAST_ACCURACY, loss=("sigmoid", "sft")),
        "KTO": learner("KTO", "auroc", LEAST_ACCURACY),
        "KTO, apo_zero_unpaired": learner("KTO", "auroc", LEAST_ACCURACY, loss="apo_zero_unpaired"),
        "ORPO": learner("ORPO", "accuracy", LEAST_ACCURACY),
        "reward model": learner("RewardModel", "accuracy", LEAST_ACCURACY),
        "process reward": learner("ProcessReward", "accuracy", LEAST_ACCURACY),
    }


def learners() -> dict[str, Learner]:
    """Return all algorithms by name, with the settings that define them."""
    return {**_policies(), **_from_teachers(), **_from_rows()}


# --- runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Course:
    """Scores, gradients and time of one run."""

    scores: tuple[float, ...]
    """Scores of all steps, or of held-out rows before and after."""
    gradients: tuple[float, ...]
    """Gradient norms of all steps, before clipping."""
    divergences: tuple[float, ...]
    """Divergences of all steps in nats per response; empty where rewards do not subtract them."""
    seconds: float
    """Wall time of the fit."""

    @property
    def first(self) -> float:
        """Score before training."""
        return self.scores[0]

    @property
    def final(self) -> float:
        """Mean score of the last steps, or the score after training."""
        return fmean(self.scores[-LAST_STEPS:]) if len(self.scores) > 2 else self.scores[-1]

    @property
    def divergence(self) -> float:
        """Mean divergence of the last steps; 0 if there is none."""
        return fmean(self.divergences[-LAST_STEPS:] or (0.0,))


def run(learner: Learner, folder: str, size: Size, seed: int) -> Course:
    """Train once."""
    import lightning as L

    module, data = learner.make(folder, size, seed)
    scores: list[float] = []
    gradients: list[float] = []
    divergences: list[float] = []

    class Notes(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            metrics = trainer.callback_metrics
            if trainer.global_step == len(gradients):
                return  # a round of DAPO that sampled again, without a step
            gradients.extend(float(metrics[name]) for name in _GRADIENTS if name in metrics)
            divergences.extend(float(metrics[name]) for name in ("kl_k1",) if name in metrics)
            if learner.metric in metrics:
                scores.append(float(metrics[learner.metric]))

    trainer = partial(make_trainer, strategy="realloc", num_sanity_val_steps=0)

    def judge() -> None:
        if learner.metric.startswith(_HELD_OUT):
            (found,) = trainer().validate(module, data, verbose=False)
            scores.append(float(found[learner.metric]))

    judge()
    began = time.perf_counter()
    trainer(max_steps=size.steps, limit_val_batches=0, log_every_n_steps=1, callbacks=[Notes()]).fit(module, data)
    seconds = time.perf_counter() - began
    judge()
    return Course(tuple(scores), tuple(gradients), tuple(divergences), seconds)


def save_teacher(folder: str, size: Size, seed: int) -> None:
    """Write a teacher that writes vowels to ``folder + "-teacher"``."""
    from lightning_realloc import SaveHuggingFace

    module, data = _given("SFT", folder, size, seed)
    save = SaveHuggingFace(folder + "-teacher")
    make_trainer(strategy="realloc", max_steps=size.steps, limit_val_batches=0, callbacks=[save]).fit(module, data)


def fill(report: BenchmarkReport, courses: Mapping[str, Sequence[Course]], known: Mapping[str, Learner]) -> None:
    """Add a row and a target for each algorithm."""
    for name, runs in courses.items():
        learner, final = known[name], fmean(course.final for course in runs)
        gradients = sorted(norm for course in runs for norm in course.gradients)
        report.add_row(
            algorithm=name, score=learner.metric, first=fmean(course.first for course in runs), final=final,
            least=min(course.final for course in runs), most=max(course.final for course in runs),
            kl_k1=fmean(course.divergence for course in runs), gradient_norm=gradients[len(gradients) // 2],
            seconds=fmean(course.seconds for course in runs),
        )  # fmt: skip
        report.settings[name] = [asdict(course) for course in runs]
        require = report.require_at_most if learner.falls else report.require_at_least
        require(f"{name}: {learner.metric}", final, learner.reach)


def main(arguments: list[str] | None = None) -> int:
    """Run all learners; return 1 if one misses its target."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of weights, data and sampling")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run algorithms whose names contain one of these")
    parser.add_argument("--quick", action="store_true", help="one seed and two steps without targets, for a quick look")
    options = parser.parse_args(arguments)
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    size, seeds = (QUICK, options.seeds[:1]) if options.quick else (FULL, options.seeds)
    known = {
        name: learner for name, learner in learners().items()
        if options.only is None or any(part in name for part in options.only)
    }  # fmt: skip
    report = BenchmarkReport(
        "learners",
        seeds=tuple(seeds),
        settings={"size": asdict(size), "learning_rate": LEARNING_RATE, "preference_rate": PREFERENCE_RATE},
    )
    be_quiet()
    courses = learn(known, size, seeds)
    fill(report, courses, known)
    if options.quick:
        report.targets.clear()
    return max(report.finish(options), int(any(not target.met for target in report.targets)))


def learn(known: Mapping[str, Learner], size: Size, seeds: Sequence[int]) -> dict[str, list[Course]]:
    """Return the runs of each learner by name, one per seed."""
    import torch

    torch.set_num_threads(1)
    courses: dict[str, list[Course]] = {name: [] for name in known}
    with tempfile.TemporaryDirectory(prefix="benchmark-learners-") as root:
        for seed in seeds:
            folder = os.path.join(root, str(seed))
            save_model(size.task, folder, seed=seed)
            if any(name.startswith("distillation") for name in known):
                save_teacher(folder, size, seed)
            for name, learner in known.items():
                course = run(learner, folder, size, seed)
                courses[name].append(course)
                sys.stderr.write(f"{name}: {course.first:.3f} to {course.final:.3f} in {course.seconds:.1f} s\n")
                gc.collect()  # a Trainer and its strategy refer to each other
    return courses


if __name__ == "__main__":
    sys.exit(main())
