"""Tokens per CPU-second of `GenerationEngine`, Hugging Face's `generate` and `generate_batch`, and vLLM.

Every arm draws the same number of tokens for the same prompts. Response lengths are geometric (mean 64, at most 256),
as in reinforcement learning, where a few long responses decide the duration of a padded batch. `GenerationEngine`
returns log-probabilities too; `generate` does not. Arms take turns on one thread; seconds are CPU time of all
processes of an arm.

The engine ``"vllm"`` runs vLLM in its own process (see `vllm_arm`) on the same prompts and lengths. ``VLLM_PYTHON`` or
``--vllm-python`` names the interpreter; without either, the rows of vLLM give that reason in place of figures.
Cases with hand-over imitate iterations of GRPO: weights change, vLLM gets them, and 8 prompts get 4 responses of 64
tokens each.

Run ``python -m benchmarks.generation``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from benchmarks.harness import BenchmarkReport, interleave, make_parser, paired_ratio
from benchmarks.vllm_arm import VllmArm, VllmUnavailableError
from examples.smollm2 import model_folder
from lightning_realloc.generation import GenerationEngine, SamplingParams

MAX_NEW_TOKENS = 256
MEAN_NEW_TOKENS = 64
PROMPT_TOKENS = (16, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: a model, a batch size, a number of samples, and the ratios to reach."""

    model: str
    dtype: str
    batch: int
    samples: int
    over_generate: float
    over_generate_batch: float | None = None
    repeats: int = 3

    @property
    def name(self) -> str:
        """Short text for tables."""
        return f"{self.model} {self.dtype} B={self.batch} N={self.samples}"


CASES = (
    Case("tiny", "float32", 32, 128, over_generate=2.5, over_generate_batch=1.5),
    Case("tiny", "float32", 32, 32, over_generate=1.8),
    Case("tiny", "float32", 8, 8, over_generate=1.1, repeats=5),
    Case("100m", "bfloat16", 32, 64, over_generate=2.2, repeats=1),
)


@dataclass(frozen=True, slots=True)
class VllmCase:
    """One comparison with vLLM: the same tokens on the same weights."""

    model: str
    dtype: str
    batch: int
    samples: int
    responses: int = 1
    """Responses per prompt. Above 1, weights change and are handed over before each generation."""
    repeats: int = 3
    over_vllm: float = 0.8
    prompt_tokens: tuple[int, int] = PROMPT_TOKENS

    @property
    def name(self) -> str:
        """Short text for tables."""
        iteration = f"x{self.responses} with hand-over" if self.responses > 1 else ""
        long = "" if self.prompt_tokens == PROMPT_TOKENS else f", prompts of {self.prompt_tokens[0]}"
        return f"{self.model} {self.dtype} B={self.batch} N={self.samples}{iteration}{long}"


VLLM_CASES = (
    VllmCase("tiny", "float32", 32, 128),
    VllmCase("100m", "bfloat16", 32, 64),
    VllmCase("tiny", "float32", 32, 8, responses=4, over_vllm=1.0, repeats=5),
    VllmCase("100m", "bfloat16", 32, 8, responses=4, over_vllm=1.0),
    VllmCase("smollm2", "float32", 32, 8, responses=4, over_vllm=1.0),
    VllmCase("100m", "bfloat16", 32, 8, responses=4, over_vllm=1.0, prompt_tokens=(768, 768)),
    VllmCase("100m", "bfloat16", 8, 8, repeats=2),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the number of tokens to generate for each."""

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]


def build_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """Return a randomly initialised model of 5 million weights ("tiny") or 100 million, with tied embeddings.

    "smollm2" is SmolLM2-135M-Instruct itself, which ``make real-model`` brings.
    """
    if name == "smollm2":
        loaded = AutoModelForCausalLM.from_pretrained(model_folder(), dtype=dtype, attn_implementation="sdpa")
        return loaded.eval().requires_grad_(False)
    torch.manual_seed(0)
    shared: dict[str, Any] = dict(
        max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, bos_token_id=1, eos_token_id=2
    )
    if name == "tiny":
        config: Any = LlamaConfig(
            vocab_size=4096, hidden_size=256, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=2, **shared,
        )  # fmt: skip
    else:
        config = Qwen2Config(
            vocab_size=32000, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, num_key_value_heads=4, **shared,
        )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def draw_workload(samples: int, vocabulary: int, seed: int, prompt_tokens: tuple[int, int] = PROMPT_TOKENS) -> Workload:
    """Return prompts of uniform and responses of geometric length."""
    generator = torch.Generator().manual_seed(seed)
    low, high = prompt_tokens
    sizes = torch.randint(low, high + 1, (samples,), generator=generator).tolist()
    prompts = tuple(tuple(torch.randint(3, vocabulary, (size,), generator=generator).tolist()) for size in sizes)
    uniform = torch.rand(samples, generator=generator)
    lengths = (uniform.log() / torch.tensor(1 - 1 / MEAN_NEW_TOKENS).log()).ceil().clamp(1, MAX_NEW_TOKENS)
    return Workload(prompts, tuple(lengths.long().tolist()))


class _OwnLimits(StoppingCriteria):
    """Ends each row of a padded batch after its own number of tokens."""

    def __init__(self, prompt_length: int, lengths: tuple[int, ...], device: torch.device) -> None:
        self._prompt_length = prompt_length
        self._lengths = torch.tensor(lengths, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return input_ids.shape[1] - self._prompt_length >= self._lengths


def run_generate(model: PreTrainedModel, work: Workload, batch: int) -> int:
    """Generate with `generate` in padded batches; return the number of useful tokens."""
    made = 0
    for begin in range(0, len(work.prompts), batch):
        prompts, lengths = work.prompts[begin : begin + batch], work.lengths[begin : begin + batch]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]).to(model.device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]).to(model.device)
        output = model.generate(
            ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=None,
            pad_token_id=0, stopping_criteria=StoppingCriteriaList([_OwnLimits(width, lengths, model.device)]),
        )  # fmt: skip
        made += sum(min(output.shape[1] - width, length) for length in lengths)
    return made


def run_generate_batch(model: PreTrainedModel, work: Workload, batch: int) -> int:
    """Generate with transformers' continuous batching and log-probabilities; return the number of tokens."""
    config = transformers.GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=MAX_NEW_TOKENS, eos_token_id=-1, pad_token_id=0
    )
    # Its defaults allocate a mask of 13 GB on CPU.
    batching = transformers.ContinuousBatchingConfig(
        page_size=32, num_blocks=batch * 12, max_batch_tokens=max(512, batch), max_requests_per_batch=batch,
        return_logprobs=True, allow_block_sharing=False,
    )  # fmt: skip
    made = finished = 0
    implementation = model.config._attn_implementation
    manager_of = model.continuous_batching_context_manager
    with manager_of(generation_config=config, continuous_batching_config=batching) as manager:
        for prompt, length in zip(work.prompts, work.lengths, strict=True):
            manager.add_request(list(prompt), max_new_tokens=length)
        while finished < len(work.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                finished += 1
                made += len(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise RuntimeError("generate_batch ended before its requests did")
    model.config._attn_implementation = implementation
    return made


def run_engine(engine: GenerationEngine, work: Workload, seed: int, responses: int = 1) -> int:
    """Generate with the engine; return the number of tokens."""
    params = SamplingParams(max_new_tokens=MAX_NEW_TOKENS, seed=seed, ignore_eos=True, n=responses)
    completions = engine.generate(work.prompts, params, token_limits=work.lengths)
    return sum(len(completion.token_ids) for completion in completions)


def measure(case: Case, report: BenchmarkReport, seed: int) -> None:
    """Time one case's arms and add its rows and targets."""
    model = build_model(case.model, getattr(torch, case.dtype))
    work = draw_workload(case.samples, model.config.vocab_size, seed)
    engine = GenerationEngine(model, max_slots=case.batch)
    arms: dict[str, Callable[[], int]] = {
        "generate": lambda: run_generate(model, work, case.batch),
        "engine": lambda: run_engine(engine, work, seed),
    }
    if case.over_generate_batch is not None:
        arms["generate_batch"] = lambda: run_generate_batch(model, work, case.batch)
    total = sum(work.lengths)
    run_engine(engine, draw_workload(2, model.config.vocab_size, seed), seed)  # the first call loads kernels
    seconds = interleave({name: checked(run, total) for name, run in arms.items()}, repeats=case.repeats)
    for name, times in seconds.items():
        ratio = paired_ratio(seconds["generate"], times)
        best = min(times)
        report.add_row(
            case=case.name, arm=name, tokens=total, cpu_s=best, tokens_per_cpu_s=total / best, over_generate=ratio
        )
    over = paired_ratio(seconds["generate"], seconds["engine"])
    report.require_at_least(f"{case.name}: over generate", over, case.over_generate)
    if case.over_generate_batch is not None:
        over = paired_ratio(seconds["generate_batch"], seconds["engine"])
        report.require_at_least(f"{case.name}: over generate_batch", over, case.over_generate_batch)


def checked(run: Callable[[], int], total: int) -> Callable[[], None]:
    """Return an arm that fails if ``run`` returns another number of tokens than ``total``."""

    def arm() -> None:
        made = run()
        if made != total:
            raise RuntimeError(f"an arm made {made} tokens, the workload wants {total}")

    return arm


def measure_against_vllm(case: VllmCase, report: BenchmarkReport, seed: int, python: Path) -> None:
    """Time the engine and vLLM in turns, and add a row for each and the target."""
    model = build_model(case.model, getattr(torch, case.dtype))
    work = draw_workload(case.samples, model.config.vocab_size, seed, case.prompt_tokens)
    if case.responses > 1:
        work = Workload(work.prompts, (64,) * case.samples)
    total = case.responses * sum(work.lengths)
    engine = GenerationEngine(model, max_slots=case.batch)
    run = checked(lambda: run_engine(engine, work, seed, case.responses), total)
    seconds: dict[str, list[float]] = {"vllm": [], "vllm, hand-over": [], "engine": []}
    with VllmArm(python, model, max_sequences=case.batch) as vllm:
        version = vllm.version
        for turn in range(case.repeats + 1):
            if case.responses > 1:
                _change_weights(model, seed=turn)
            hand_over = vllm.hand_over() if case.responses > 1 else 0.0
            of_vllm = hand_over + vllm.generate(work.prompts, work.lengths, case.responses)
            begin = time.process_time()
            engine.weights_updated()
            run()
            of_engine = time.process_time() - begin
            if turn:  # the first turn loads kernels
                for arm, spent in zip(seconds, (of_vllm, hand_over, of_engine), strict=True):
                    seconds[arm].append(spent)
    over = paired_ratio(seconds["vllm"], seconds["engine"])
    for arm in ("vllm", "engine"):
        best = min(seconds[arm])
        report.add_row(
            case=case.name, arm=arm, tokens=total, cpu_s=best, tokens_per_cpu_s=total / best,
            hand_over_cpu_s=min(seconds["vllm, hand-over"]) if arm == "vllm" else 0.0,
            over_vllm=over if arm == "engine" else 1.0,
        )  # fmt: skip
    report.settings["vllm"] = version
    report.require_at_least(f"{case.name}: over vllm", over, case.over_vllm)


@torch.no_grad()
def _change_weights(model: PreTrainedModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))


def compare_with_vllm(options: argparse.Namespace, report: BenchmarkReport) -> None:
    """Measure the chosen cases against vLLM; if it cannot run, the rows have the reason."""
    for case in VLLM_CASES:
        if options.only is not None and options.only not in case.name:
            continue
        try:
            if options.vllm_python is None:
                raise VllmUnavailableError("VLLM_PYTHON is not set, and --vllm-python is not given")
            measure_against_vllm(case, report, options.seed, options.vllm_python)
        except VllmUnavailableError as reason:
            report.add_row(case=case.name, arm="vllm", skipped=str(reason))


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--seed", type=int, default=1, help="seed of prompts, lengths and sampling")
    parser.add_argument("--only", help="run the cases whose name contains this text")
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", default=os.environ.get("VLLM_PYTHON") or None,
        help="interpreter of an environment with vLLM; by default that of the variable VLLM_PYTHON",
    )  # fmt: skip
    parser.add_argument("--vllm-alone", action="store_true", help="run only the cases with vLLM")
    options: argparse.Namespace = parser.parse_args(arguments)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    report = BenchmarkReport("generation", seeds=(options.seed,), settings={"clock": "process CPU time"})
    for case in () if options.vllm_alone else CASES:
        if options.only is None or options.only in case.name:
            measure(case, report, options.seed)
    compare_with_vllm(options, report)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
