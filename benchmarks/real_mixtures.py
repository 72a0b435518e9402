"""Predicted seconds of one GRPO step next to those that NeMo RL publishes, most of them of mixtures of experts.

Seconds, layouts, mean and longest lengths are from the performance summaries of NeMo RL 0.6, and of 0.4 and 0.5 for the
dense models, which are controls (docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html). Sizes of batches,
micro-batches and checkpointing are from its recipes of the same names. A step generates, computes logprobs of the
policy and of the reference, trains, and sends the weights to the engine, all in turn on all devices.

No constant is fitted. What is assumed:

- Lengths of responses are uniform, with the published mean and the longest that the recipe allows. Prompts follow from
  the published tokens per second.
- The engine captures decoding with tensor parallelism in CUDA graphs, as vLLM does.
- Megatron's ``ep`` spans ``tp`` and ``cp``, ours does not. Where they are more than 1 in training, ``dp`` takes their
  place. It divides the optimizer between replicas, we do not.
- Sending weights to the engine is not predicted: it is a matter of their transport. For DeepSeek-V3 on H100 its
  published seconds are subtracted (NVIDIA-NeMo/RL, pull requests 638 and 1187; other runs: 43 to 70 s). About 20 s of
  them move optimizer states to the host and back.

Run ``python -m benchmarks.real_mixtures``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.harness import BenchmarkReport, make_parser
from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.layout.dims import Layout
from lightning_realloc.report.model_source import read_roles
from lightning_realloc.tuning.estimate.roofline import RooflineEstimator
from lightning_realloc.tuning.memory.parts import EngineMemory, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

RATIO_BAND = (0.45, 1.4)
"""Least and largest predicted over published seconds of a step."""
MEDIAN_TOLERANCE = 0.2
"""Largest median error of mixtures."""
NUM_LENGTHS = 16
"""Equally likely response lengths that stand for the uniform distribution."""
FLOW = Dataflow(
    (
        ModelFunctionCall("actor.generate", "generate", "actor", "roll_out", ("batch",), ("rollout",)),
        ModelFunctionCall("actor.infer", "infer", "actor", "score", ("rollout",), ("logprobs",)),
        ModelFunctionCall("reference.infer", "infer", "reference", "score", ("rollout",), ("ref_logprobs",)),
        ModelFunctionCall("actor.train", "train", "actor", "actor_loss", ("rollout", "logprobs", "ref_logprobs")),
    )
)
SETTINGS = MemorySettings(
    master_bytes=4, copy_bytes=2, gathered_bytes=2, engine=EngineMemory(captures_collectives=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A published step."""

    model: str
    cluster: str
    generation: str
    training: str
    num_prompts: int
    samples_per_prompt: int
    minibatches: int
    prompt: int
    response: int
    """Mean tokens of a response."""
    longest: int
    """Most tokens of a prompt with its response, and of a micro-batch."""
    checkpointing: bool
    published: float
    """Seconds of a step."""
    refit: float | None = None
    """Published seconds in which weights go to the engine, and the optimizer to the host and back; None if unknown."""

    @property
    def is_mixture(self) -> bool:
        """Whether the model is a mixture of experts."""
        shape = _roles(self.model)["actor"].shape
        return shape is not None and shape.experts is not None

    @property
    def compared(self) -> float:
        """Published seconds that the prediction is for."""
        return self.published - (self.refit or 0.0)

    def estimator(self) -> RooflineEstimator:
        """Return the estimator of the step's calls."""
        most = self.longest - self.prompt
        least = max(1, 2 * self.response - most)
        lengths = tuple(round(least + (most - least) * i / (NUM_LENGTHS - 1)) for i in range(NUM_LENGTHS))
        workload = Workload(
            num_sequences=self.num_prompts * self.samples_per_prompt, prompt_tokens=self.prompt, response_tokens=most,
            num_minibatches=self.minibatches, samples_per_prompt=self.samples_per_prompt,
        )  # fmt: skip
        roles, cluster = _roles(self.model), ClusterSpec.parse(self.cluster)
        return RooflineEstimator(FLOW, cluster, roles, SETTINGS, workload, responses=lengths)

    def predicted(self) -> dict[str, float]:
        """Return the seconds of each call."""
        estimator, generation, training = self.estimator(), Layout.parse(self.generation), Layout.parse(self.training)
        plans = {
            "actor.generate": CallPlan(generation, max_slots=1024),
            "actor.infer": CallPlan(training, self.longest),
            "reference.infer": CallPlan(training, self.longest),
            "actor.train": CallPlan(training, self.longest, self.checkpointing),
        }
        return {name: estimator.call_seconds(name, plan).total for name, plan in plans.items()}


@cache
def _roles(model: str) -> dict[str, RoleMemory]:
    return read_roles({"actor": model, "reference": model}, FLOW, is_priced=True)


STEPS = (
    Step(
        model="Llama-3.1-8B", cluster="h100:2x8", generation="dp16", training="pp2.dp8", num_prompts=64,
        samples_per_prompt=32, minibatches=4, prompt=120, response=1019, longest=4096, checkpointing=False,
        published=92.8,
    ),
    Step(
        model="Qwen3-32B", cluster="h100:4x8", generation="dp8.tp4", training="pp4.dp2.tp4", num_prompts=64,
        samples_per_prompt=32, minibatches=4, prompt=110, response=3206, longest=4096, checkpointing=False,
        published=393,
    ),
    Step(
        model="Qwen3-30B-A3B", cluster="h100:4x8", generation="dp16.tp2", training="dp32.ep8", num_prompts=64,
        samples_per_prompt=32, minibatches=4, prompt=101, response=3197, longest=4096, checkpointing=False,
        published=194,
    ),
    Step(
        model="Qwen3-30B-A3B", cluster="gb200:1x16", generation="dp16", training="dp16.ep16", num_prompts=64,
        samples_per_prompt=32, minibatches=4, prompt=110, response=3199, longest=4096, checkpointing=False,
        published=219,
    ),
    Step(
        model="Qwen3-235B-A22B", cluster="h100:16x8", generation="dp8.tp16", training="pp8.dp16.ep16", num_prompts=16,
        samples_per_prompt=32, minibatches=1, prompt=127, response=5729, longest=8192, checkpointing=True,
        published=429,
    ),
    Step(
        model="Qwen3-235B-A22B", cluster="h100:32x8", generation="dp16.tp16", training="pp8.dp32.ep16", num_prompts=16,
        samples_per_prompt=32, minibatches=1, prompt=127, response=5718, longest=8192, checkpointing=True,
        published=333,
    ),
    Step(
        model="Qwen3-235B-A22B", cluster="gb200:1x64", generation="dp8.tp8", training="pp4.dp16.ep16", num_prompts=16,
        samples_per_prompt=32, minibatches=1, prompt=127, response=5688, longest=8192, checkpointing=True,
        published=284,
    ),
    Step(
        model="DeepSeek-V3", cluster="h100:32x8", generation="dp8.tp32", training="pp16.dp16.ep16", num_prompts=32,
        samples_per_prompt=16, minibatches=1, prompt=111, response=706, longest=1536, checkpointing=True,
        published=135, refit=55,
    ),
    Step(
        model="DeepSeek-V3", cluster="h100:64x8", generation="dp16.tp32", training="pp16.dp32.ep16", num_prompts=32,
        samples_per_prompt=16, minibatches=1, prompt=111, response=706, longest=1536, checkpointing=True,
        published=116, refit=55,
    ),
    Step(
        model="DeepSeek-V3", cluster="gb200:2x64", generation="dp4.tp32", training="pp8.dp16.ep16", num_prompts=32,
        samples_per_prompt=16, minibatches=1, prompt=111, response=711, longest=1536, checkpointing=True,
        published=108,
    ),
)  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """Predict every step and compare."""
    parser = make_parser(__doc__ or "")
    options = parser.parse_args(argv)
    report = BenchmarkReport("seconds of a GRPO step, published by NeMo RL")
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for step in STEPS:
        calls = step.predicted()
        ratio = sum(calls.values()) / step.compared
        ratios[step.is_mixture].append(ratio)
        report.add_row(
            model=step.model, devices=step.cluster, generation=step.generation, training=step.training,
            published_s=f"{step.published:g}", refit_s="" if step.refit is None else f"{step.refit:g}",
            predicted_s=f"{sum(calls.values()):.0f}", ratio=f"{ratio:.2f}", generate_s=f"{calls['actor.generate']:.1f}",
            infer_s=f"{calls['actor.infer'] + calls['reference.infer']:.1f}", train_s=f"{calls['actor.train']:.1f}",
        )  # fmt: skip
    both = ratios[True] + ratios[False]
    report.require_at_least("least predicted over published seconds", min(both), RATIO_BAND[0])
    report.require_at_most("largest predicted over published seconds", max(both), RATIO_BAND[1])
    errors = [abs(ratio - 1) for ratio in ratios[True]]
    report.require_at_most("median error of mixtures", median(errors), MEDIAN_TOLERANCE)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
