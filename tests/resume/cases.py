"""The runs of the trial: algorithms, layouts and options, and one run from the beginning or from a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from lightning_realloc import Curriculum, GenerationOptions, PromptDataModule, RolloutBudget
from lightning_realloc.data.loader import BatchLoader
from lightning_realloc.generation import Speculation
from lightning_realloc.strategies import ReallocStrategy
from tests.models import byte_tokenizer, tiny_model
from tests.strategies import runs
from tests.strategies.algorithms import preferences
from tests.strategies.checkpoints.checkpoint_runs import table
from tests.strategies.runs import calls

NUM_STEPS = 6
MOMENTS = (2, 3, 4)
"""Steps whose checkpoints are resumed; an epoch has three."""
LORA = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "v_proj"]}


def plan_of(algorithm: str, train: str, generate: str, infer: str, *, has_reference: bool = True) -> dict[str, Any]:
    """Return a plan for an algorithm's calls."""
    named = {"actor_train": train}
    if has_reference and algorithm != "sft":
        named["reference_infer"] = infer
    if algorithm in ("grpo", "ppo"):
        named["actor_generate"] = generate
    if algorithm == "ppo":
        named |= {"critic_infer": infer, "critic_train": train}
    return calls(**named)


LAYOUTS = {
    "dp2": ("dp2", "dp2", "dp2"),
    "fsdp2": ("fsdp2", "tp2", "dp2"),
    "tp2": ("tp2", "dp2", "tp2"),
    "pp2": ("pp2", "dp2", "dp2"),
    "apart": ("dp1@0-0", "dp1@0-0", "dp1@1-1"),
    "crossed": ("dp1@1-1", "dp2", "dp1@0-0"),
    "one": ("dp1", "dp1", "dp1"),
}
"""Name -> layouts for training, generation and inference."""


@dataclass(frozen=True)
class Case:
    """A run."""

    algorithm: str
    layout: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the algorithm."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the strategy."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Further entries of the plan."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a data module with two data sets; without any, batches come in the loader's plain order."""
    launcher: str = "workers"
    """Processes that a pool starts, or Lightning's "spawn"."""


CURRICULUM = Curriculum(hopeless=0.3, solved=0.8, min_responses=2, rest=0.5, new=0.5)
DRAWN = {"curriculum": CURRICULUM, "mix": [(0, {"a": 0.7, "b": 0.3}), (3, {"a": 0.2, "b": 0.8})]}

OPTIONS: dict[str, Case] = {
    "curriculum": Case("grpo", "fsdp2", data=DRAWN),
    "curriculum, ppo": Case("ppo", "tp2", data=DRAWN),
    "curriculum, stale": Case("grpo", "apart", options={"max_staleness": 2}, data=DRAWN),
    "adapters": Case("grpo", "fsdp2", {"peft_config": LORA, "reference": None}),
    "dropout": Case("sft", "fsdp2", {"actor": "gpt2"}),
    "drafts": Case("grpo", "dp2", {"speculation": Speculation(drafter="ngram", num_draft_tokens=2)}),
    "moved samples": Case("grpo", "dp2", {"generation": GenerationOptions(sample_reallocation=True)}),
    "rollout budget": Case("grpo", "fsdp2", {"generation": GenerationOptions(rollout_budget=RolloutBudget(tokens=40))}),
    "mini-batches": Case("ppo", "fsdp2", {"train_options": runs.options(num_epochs=2, num_minibatches=2)}),
    "stale": Case("grpo", "apart", options={"max_staleness": 1}),
    "stale, crossed": Case("ppo", "crossed", options={"max_staleness": 1}),
    "stale, no reference": Case("grpo", "tp2", {"kl_coef": 0.0, "reference": None}, {"max_staleness": 1}),
    "two stale": Case("grpo", "tp2", options={"max_staleness": 2}),
    "two stale, apart": Case("grpo", "apart", options={"max_staleness": 2, "overlap": "calls"}),
    "in turn": Case("ppo", "fsdp2", options={"overlap": "none"}),
    "offload": Case("ppo", "fsdp2", plan={"offload": ["reference", "critic.optimizer"]}),
    "background": Case("grpo", "fsdp2", options={"async_checkpoints": True}),
    "spawn": Case("grpo", "fsdp2", launcher="spawn"),
}
CASES = {
    f"{algorithm} {layout}": Case(algorithm, layout)
    for algorithm in ("sft", "dpo", "grpo", "ppo")
    for layout in LAYOUTS
    if layout != "one"
    if algorithm != "sft" or layout in ("dp2", "fsdp2", "tp2", "pp2")  # its one call must use both ranks
} | OPTIONS


class SaveAt(Callback):
    """Saves a checkpoint at every moment and at the end."""

    def __init__(self, folder: Path, moments: tuple[int, ...]) -> None:
        self.folder, self.moments = folder, moments

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        """Save."""
        if trainer.global_step in self.moments:
            trainer.save_checkpoint(self.folder / str(trainer.global_step))


def make_module(case: Case) -> Any:
    """Return the algorithm with models of its own."""
    settings: dict[str, Any] = {"optimizer": partial(AdamW, lr=1e-3, eps=1e-4), "seed": 0, **case.settings}
    settings["lr_scheduler"] = _decay
    if settings.get("actor") == "gpt2":
        settings["actor"] = tiny_model("gpt2", resid_pdrop=0.3)
    make = {"sft": runs.sft, "dpo": preferences.dpo, "grpo": runs.grpo, "ppo": runs.ppo}[case.algorithm]
    return make(**settings)


def _decay(optimizer: Any) -> Any:
    return StepLR(optimizer, 1, gamma=0.9)


def drawn_prompts(**settings: Any) -> PromptDataModule:
    """Return twelve prompts of two data sets, in batches of four."""
    sets = {name: [{"prompt": f"{name}{number}"} for number in range(size)] for name, size in (("a", 7), ("b", 5))}
    return PromptDataModule(sets, batch_size=4, seed=5, tokenizer=byte_tokenizer(), **settings)


def fit(case: Case, folder: str, resume: int | None, seed: int) -> list[dict[str, float]]:
    """Train to the end, and return what each step logged; save into ``folder``, with another seed for processes."""
    is_spawned = case.launcher == "spawn"
    world_size = 2 if is_spawned else runs.world_size()
    L.seed_everything(seed + int(os.environ.get("RANK", 0)), verbose=False)
    record, target = runs.Record(), Path(folder, "straight" if resume is None else f"from{resume}")
    plan = {
        **plan_of(case.algorithm, *LAYOUTS[case.layout], has_reference=case.settings.get("kl_coef") != 0.0),
        **case.plan,
    }
    strategy = ReallocStrategy(plan, **case.options, **({"launcher": "spawn"} if is_spawned else {}))
    saved = SaveAt(target, (*(MOMENTS if resume is None else ()), NUM_STEPS))
    trainer = runs.trainer(strategy, world_size, max_steps=NUM_STEPS, max_epochs=-1, callbacks=[record, saved])
    if case.algorithm == "dpo":
        (pairs,) = preferences.pairs(1, size=10)
        data = BatchLoader(pairs, batch_size=2, group_size=2, seed=5)
    elif case.data:
        data = drawn_prompts(**case.data)
    else:
        data = BatchLoader(table(responses=case.algorithm == "sft"), batch_size=4, seed=5)
    trainer.fit(make_module(case), data, ckpt_path=None if resume is None else Path(folder, "straight", str(resume)))
    return record.logged
