"""A TRL script, converted: ``python -m examples.hf_script`` (first ``python -m examples.demo --prepare-only``).

Removed lines are comments that begin with ``# TRL:``, new lines end with ``# ours``. Tokenizer, model, data set and
reward function are unchanged.
"""

from pathlib import Path

import lightning as L  # ours
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.sorting import read_jsonl

# TRL: from trl import GRPOConfig, GRPOTrainer
from lightning_realloc import GRPO, PromptDataModule, SamplingParams, SaveHuggingFace  # ours


def right_letters(prompts, completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer, strict=True)]


def main(folder="runs/demo/warm", data="runs/demo/train.jsonl", output="runs/hf_script", max_steps=20):
    """Train, and print an answer of the written model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    dataset = Dataset.from_list(read_jsonl(Path(data)))

    # TRL: args = GRPOConfig(output, per_device_train_batch_size=64, num_generations=8, max_completion_length=10,
    # TRL:                   beta=0.04, learning_rate=5e-4, max_steps=max_steps, push_to_hub=False)
    # TRL: trainer = GRPOTrainer(model, right_letters, args, train_dataset=dataset, processing_class=tokenizer)
    # TRL: trainer.train()
    # TRL: trainer.save_model()
    sampling = SamplingParams(n=8, max_new_tokens=10)  # ours
    grpo = GRPO(model, right_letters, tokenizer=tokenizer, sampling=sampling, kl_coef=0.04, learning_rate=5e-4)  # ours
    save = SaveHuggingFace(output, push_to_hub=None)  # ours
    trainer = L.Trainer(strategy="realloc", max_steps=max_steps, callbacks=[save])  # ours
    trainer.fit(grpo, PromptDataModule(dataset, batch_size=8))  # ours: prompts, 64 responses as above

    if trainer.is_global_zero:
        trained = AutoModelForCausalLM.from_pretrained(output)
        ids = tokenizer(dataset[0]["prompt"], return_tensors="pt")
        text = tokenizer.decode(trained.generate(**ids, max_new_tokens=10)[0], skip_special_tokens=True)
        print(f"{text}   (right: {dataset[0]['answer']})")


if __name__ == "__main__":
    main()
