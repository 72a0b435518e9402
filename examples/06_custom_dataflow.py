"""Dataflow of your own: two reward models, and a reference that follows the actor.

Run it with ``python -m examples.06_custom_dataflow``. The calls of an algorithm are its decorated methods. A new
method that declares what it needs and produces gets a place in the graph and in the plan. Here the reward is the lower
of two models' scores, and the reference is an exponential moving average of the actor.
"""

import random
from dataclasses import replace

import lightning as L
import torch

from examples.sorting import byte_tokenizer, problem, random_words, tiny_llama
from lightning_realloc import GRPO, PromptDataModule, ReallocStrategy, SamplingParams
from lightning_realloc.algorithms.base.calls import compute, infer
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.runtime.parallel.packed_forward import sequence_scores

PLAN = {"calls": {
    "actor.generate":  "dp4@0-3",
    "reference.infer": "dp2@0-1",
    "helpful.infer":   "dp1@2",      # the two reward models score at the same time as the reference
    "harmless.infer":  "dp1@3",
    "actor.train":     "fsdp4@0-3",
}}  # fmt: skip


def brevity(completions, **columns):
    return [-0.01 * len(text) for text in completions]


class CautiousGRPO(GRPO):
    """GRPO with the lower of two models' scores, and a reference that is an average of recent actors."""

    evaluation_calls = ("actor.generate", "helpful.infer", "harmless.infer", "judge")

    def __init__(self, actor, reward, helpful, harmless, **settings):
        super().__init__(actor, reward, **settings)
        self.sources |= {"helpful": helpful, "harmless": harmless}

    def roles(self):
        actor, reference = super().roles()
        scorers = [
            Role(name=name, source=self.sources[name], trained=False, task="sequence_classification")
            for name in ("helpful", "harmless")
        ]
        return actor, replace(reference, average_of="actor", average_rate=0.05), *scorers

    @infer("helpful", needs="rollout", produces="helpful_scores")
    def score_helpful(self, helpful, batch):
        return sequence_scores(helpful, batch)

    @infer("harmless", needs="rollout", produces="harmless_scores")
    def score_harmless(self, harmless, batch):
        return sequence_scores(harmless, batch)

    @compute(needs=("rollout", "helpful_scores", "harmless_scores"), produces="rewards")
    def judge(self, samples):
        both = torch.minimum(samples.tensor("helpful_scores"), samples.tensor("harmless_scores"))
        return {"rewards": super().judge(samples)["rewards"] + both}


def main(num_iterations=20):
    """Train, and return the trainer with everything it logged; called in every process."""
    words = random_words(16 * num_iterations, random.Random(0))
    model = CautiousGRPO(
        actor=tiny_llama(),
        reward=brevity,
        helpful=tiny_llama(hidden_size=128),
        harmless=tiny_llama(num_hidden_layers=1),
        tokenizer=byte_tokenizer(),
        sampling=SamplingParams(n=4, max_new_tokens=10),
        kl_coef=0.04,
        learning_rate=1e-3,
    )
    trainer = L.Trainer(
        strategy=ReallocStrategy(plan=PLAN), accelerator="cpu", devices=4, max_steps=num_iterations,
        logger=False, enable_checkpointing=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, PromptDataModule([problem(word) for word in words], batch_size=16))
    return trainer


if __name__ == "__main__":
    fitted = main()
    if fitted.is_global_zero:
        print({name: round(float(value), 3) for name, value in fitted.callback_metrics.items()})
