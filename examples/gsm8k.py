"""GRPO on a pretrained instruct model: Qwen3-0.6B and the school mathematics of GSM8K, from the hub, on all devices."""

import lightning as L

from lightning_realloc import GRPO, DatasetSource, PromptDataModule, SamplingParams, SaveHuggingFace
from lightning_realloc.rewards import NumericAnswer


def train(model, data, held_out, folder, *, prompts=32, max_new_tokens=512, trainer, **settings):
    """Train; return the trainer, and the share of held-out questions answered right before and after."""
    sampling = SamplingParams(n=8, max_new_tokens=max_new_tokens)
    grpo = GRPO(model, NumericAnswer(), sampling=sampling, **settings)  # the last number of a response is its answer
    rows = PromptDataModule(data, val_data=held_out, prompt_column="question", text_prompts="user", batch_size=prompts)
    runner = L.Trainer(strategy="realloc", **trainer)
    runner.callbacks.append(SaveHuggingFace(folder))
    (before,) = runner.validate(grpo, rows, verbose=False)
    runner.fit(grpo, rows)
    (after,) = runner.validate(grpo, rows, verbose=False)
    return runner, before["val/reward"], after["val/reward"]


def main():
    """Train on the data of the hub."""
    train(
        "Qwen/Qwen3-0.6B",
        DatasetSource("openai/gsm8k", name="main", split="train"),
        DatasetSource("openai/gsm8k", name="main", split="test[:256]"),
        "runs/gsm8k/trained",
        trainer={"precision": "bf16-mixed", "max_steps": 200, "max_epochs": -1},
        learning_rate=1e-6,
    )


if __name__ == "__main__":
    main()
