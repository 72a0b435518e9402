"""GRPO in a few lines, on the model and the prompts of ``python -m examples.demo --prepare-only``."""

import lightning as L

from lightning_realloc import GRPO, PromptDataModule, SamplingParams


def right_letters(prompts, completions, answer, **columns):  # TRL's signature; other columns of the data come by name
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


if __name__ == "__main__":
    model = GRPO(
        "runs/demo/warm",
        right_letters,
        sampling=SamplingParams(n=8, max_new_tokens=10),
        learning_rate=5e-4,
    )
    data = PromptDataModule("runs/demo/train.jsonl", val_data="runs/demo/held_out.jsonl", batch_size=32)
    trainer = L.Trainer(strategy="realloc", accelerator="cpu", devices=4, max_epochs=4)
    trainer.fit(model, data)
