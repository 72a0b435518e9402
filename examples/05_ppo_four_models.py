"""PPO with four models on four ranks, with a layout for every call: ``python -m examples.05_ppo_four_models``.

No network, no GPU: the models are tiny Llamas with random weights. So the reward is arbitrary, and the actor
learns it all the same. Lightning starts this script again for each of the ranks 1-3.
"""

import random

import lightning as L
from lightning.pytorch.callbacks import Callback

from examples.report import silence_hints
from examples.sorting import byte_tokenizer, problem, random_words, tiny_llama
from lightning_realloc import PPO, PromptDataModule, ReallocStrategy, SamplingParams, TrainOptions

PLAN = {
    "calls": {
        "actor.generate":  "dp2.tp2@0-3",  # two replicas, each split over two ranks
        "reference.infer": "tp2@0-1",      # at the same time as the next two, on other ranks
        "reward.infer":    "fsdp2@2-3",
        "critic.infer":    {"layout": "tp2@2-3", "micro_batch_tokens": 8192},
        "actor.train":     {"layout": "fsdp2.tp2@0-3", "gradient_checkpointing": True},
        "critic.train":    "fsdp4@0-3",
    },
    "offload": ["reference", "reward"],    # on the device only for their calls
}  # fmt: skip


class Diary(Callback):
    """Prints a line per iteration."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        """Print the logged metrics."""
        if trainer.is_global_zero:
            seen = {name: float(value) for name, value in trainer.callback_metrics.items()}
            seconds = sum(value for name, value in seen.items() if name.startswith("seconds/"))
            print(
                f"iteration {trainer.global_step:3}   score {seen['score']:+.2f}   KL {seen['kl_k3']:6.2f}   "
                f"critic's loss {seen['critic/loss']:6.3f}   {seconds:.2f} s in calls"
            )


def main(num_iterations: int = 40) -> L.Trainer:
    """Train, and return the trainer with everything it logged; called in every process."""
    silence_hints()
    words = random_words(16 * num_iterations, random.Random(0))
    model = PPO(
        actor=tiny_llama(),
        critic=tiny_llama(num_hidden_layers=1),  # models may differ in all but the vocabulary
        reference=tiny_llama(),
        reward=tiny_llama(hidden_size=128),
        tokenizer=byte_tokenizer(),
        sampling=SamplingParams(n=4, max_new_tokens=4),
        kl_coef=0.02,
        learning_rate=3e-3,
        train_options=TrainOptions(num_epochs=2, num_minibatches=2),
    )
    trainer = L.Trainer(
        strategy=ReallocStrategy(plan=PLAN),
        accelerator="cpu",
        devices=4,
        max_steps=num_iterations,
        callbacks=[Diary()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, PromptDataModule([problem(word) for word in words], batch_size=16))
    return trainer


if __name__ == "__main__":
    main()
