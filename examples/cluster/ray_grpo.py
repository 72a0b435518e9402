"""GRPO on a Ray cluster, with rewards from actors: ``python examples/cluster/ray_grpo.py`` on the head's machine.

Model and prompts are those of ``python -m examples.demo --prepare-only``. Without a cluster, Ray starts here. A lost
rank or machine starts the run again from its last checkpoint, at most three times.
"""

import lightning as L
import ray
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_realloc import GRPO, PromptDataModule, ReallocStrategy, SamplingParams
from lightning_realloc.rewards import RayReward


@ray.remote(num_cpus=0)
class Judge:
    """Rewards right answers; a real one would hold a model, a sandbox or a connection."""

    def score(self, prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        """Return 1 for each right answer."""
        return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    ray.init(num_cpus=4)  # on a cluster: ray.init(address="auto")
    model = GRPO(
        "runs/demo/warm",
        RayReward([Judge.remote(), Judge.remote()], name="judge", columns=["answer"]),
        sampling=SamplingParams(n=8, max_new_tokens=10),
        learning_rate=5e-4,
    )
    trainer = L.Trainer(
        strategy=ReallocStrategy(launcher="ray", max_failures=3),
        accelerator="cpu",
        devices=2,
        num_nodes=2,
        max_epochs=4,
        callbacks=[ModelCheckpoint("runs/ray/checkpoints", every_n_train_steps=10)],
    )
    trainer.fit(model, PromptDataModule("runs/demo/train.jsonl", batch_size=32))
