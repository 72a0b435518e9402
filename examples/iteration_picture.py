"""The README's picture: one iteration of PPO on four CPU ranks, as it was measured.

``python -m examples.iteration_picture`` trains tiny models for a minute, with actor and critic on ranks of their own,
and writes ``docs/images/iteration.svg``. No network, no GPU. Lightning starts this script again for the ranks 1-3.
"""

import random
import tempfile
from pathlib import Path

import lightning as L

from examples.report import is_first_process, silence_hints
from examples.sorting import byte_tokenizer, problem, random_words, tiny_llama
from lightning_realloc import PPO, PromptDataModule, ReallocStrategy, SamplingParams, Timeline
from lightning_realloc.recording.iteration_picture import detailed_steps, iteration_lanes
from lightning_realloc.recording.reader import read_run
from lightning_realloc.tuning.timeline.picture import draw

PLAN = {
    "calls": {
        "actor.generate":  "dp4@0-3",
        "reference.infer": "dp2@0-1",
        "reward.infer":    "dp1@2",
        "critic.infer":    "dp2@2-3",
        "actor.train":     "fsdp2@0-1",
        "critic.train":    "fsdp2@2-3",
    },
}  # fmt: skip
FILE = Path("docs/images/iteration.svg")
ITERATIONS = 9


def main() -> None:
    """Train, and draw the iteration of median length; called in every process."""
    silence_hints()
    folder = Path(tempfile.gettempdir()) / "iteration_picture"
    train(folder)
    if is_first_process():
        session = read_run(folder).last
        lengths = {one.step: one.end - one.start for one in session.ranks[0]}
        steps = sorted(detailed_steps(session)[2:], key=lengths.__getitem__)  # the first ones load libraries
        lanes = iteration_lanes(session, steps[len(steps) // 2])
        FILE.write_text(draw(lanes, title="One PPO iteration on four CPU ranks, as measured") + "\n")
        print(f"the picture is in {FILE}")


def train(folder: Path) -> None:
    """Record a short run."""
    words = random_words(16 * ITERATIONS, random.Random(0))
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    model = PPO(
        actor=tiny_llama(**sizes),
        critic=tiny_llama(**sizes),
        reference=tiny_llama(**sizes),
        reward=tiny_llama(**sizes),
        tokenizer=byte_tokenizer(),
        sampling=SamplingParams(n=4, max_new_tokens=24, ignore_eos=True),
        kl_coef=0.02,
        learning_rate=1e-3,
    )
    trainer = L.Trainer(
        strategy=ReallocStrategy(plan=PLAN),
        accelerator="cpu",
        devices=4,
        max_steps=ITERATIONS,
        callbacks=[Timeline(folder)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, PromptDataModule([problem(word) for word in words], batch_size=16))


if __name__ == "__main__":
    main()
