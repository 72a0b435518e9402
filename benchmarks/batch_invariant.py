"""Price of ``batch_invariant=True``, and the responses that change with the batch with and without it.

Samples with prompts of 32 tokens get 32 sampled tokens each: all of a batch together, and some of them in a batch of
seven, alone, and with drafts. A response has changed if a bit of its tokens or log-probabilities has. The model is a
Llama in the shape of SmolLM2 135M with random weights. Both arms take turns; seconds are CPU time of one thread.

Run ``python -m benchmarks.batch_invariant``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from transformers import PreTrainedModel

from benchmarks.harness import BenchmarkReport, interleave, make_parser, paired_ratio
from benchmarks.llamas import Shape, build_llama
from benchmarks.one_gpu_setting import Recorder, Scale, Setting
from lightning_realloc.generation import Completion, GenerationEngine, SamplingParams, Speculation

SMOL = Shape(576, 1536, 30, 9, 64, tied=True, num_kv_heads=3, vocabulary=49152, max_length=2048)
TOKENS = 32
"""Tokens of each response, and of each prompt but the long ones."""
LONG = 512
"""Tokens of a long prompt."""
BATCHES = (32, 8, 1)
GROUPS = (1, 7)
"""Sizes of the batches whose responses are compared with those of the largest batch."""


def batch_invariant_cases(scale: Scale) -> tuple[str, ...]:
    """Return the cases of :func:`measure_batch_invariant`."""
    return tuple(f"{next(iter(scale.shapes))} B={batch}" for batch in BATCHES)


def measure_batch_invariant(setting: Setting, recorder: Recorder) -> None:
    """Measure the smallest model on the device."""
    name, shape = next(iter(setting.scale.shapes.items()))
    model = build_llama(shape, setting.device, setting.scale.dtype)
    changed = count_changed(model)
    for batch in BATCHES:
        seconds, price = compare(model, batch, repeats=1, clock=time.perf_counter)  # a call ends with its tokens read
        recorder.row(
            f"{name} B={batch}", plain_s=seconds, price=price, changed_plain=changed[False],
            changed_invariant=changed[True],
        )  # fmt: skip
    recorder.at_most("responses that changed with the batch or with drafts", changed[True], 0)


def compare(
    model: PreTrainedModel,
    batch: int,
    prompt_tokens: int = TOKENS,
    *,
    repeats: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> tuple[float, float]:
    """Return the least seconds of a batch without ``batch_invariant``, and how many times as long it takes with it."""
    engines = {is_invariant: GenerationEngine(model, batch_invariant=is_invariant) for is_invariant in (False, True)}
    arms = {str(key): partial(run, engine, range(batch), prompt_tokens) for key, engine in engines.items()}
    if model.device.type == "cuda":
        for _ in range(2):  # the second call captures graphs
            arms["False"]()
    seconds = interleave(arms, repeats=repeats, clock=clock)
    for engine in engines.values():
        engine.release()
    return min(seconds["False"]), paired_ratio(seconds["True"], seconds["False"])


def run(engine: GenerationEngine, numbers: Sequence[int], prompt_tokens: int = TOKENS) -> list[Completion]:
    """Return the responses of the samples with these numbers."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 512, (max(BATCHES), prompt_tokens), generator=generator).tolist()
    params = SamplingParams(max_new_tokens=TOKENS, seed=1, ignore_eos=True)
    return engine.generate([prompts[number] for number in numbers], params, sample_ids=list(numbers))


def count_changed(model: PreTrainedModel) -> dict[bool, int]:
    """Return, without and with ``batch_invariant``, the number of responses that other batches or drafts change."""
    counts = {}
    for is_invariant in (False, True):
        engine = GenerationEngine(model, batch_invariant=is_invariant)
        expected = {one.sample_id: one for one in run(engine, range(max(BATCHES)))}
        drafting = GenerationEngine(model, batch_invariant=is_invariant, speculation=Speculation(num_draft_tokens=3))
        others = [*(one for size in GROUPS for one in run(engine, range(size))), *run(drafting, range(max(GROUPS)))]
        counts[is_invariant] = sum(bits_of(one) != bits_of(expected[one.sample_id]) for one in others)
        engine.release()
    return counts


def bits_of(completion: Completion) -> tuple[object, ...]:
    """Return tokens and log-probabilities."""
    return completion.token_ids, completion.logprobs


def main(arguments: list[str] | None = None) -> int:
    """Measure on one CPU thread, and report."""
    parser = make_parser(__doc__ or "")
    parser.add_argument("--repeats", type=int, default=3, help="turns of a single sample; larger batches have one")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    num_compared = sum(GROUPS) + max(GROUPS)
    report = BenchmarkReport("batch_invariant", settings={"compared responses": num_compared}, group_by="dtype")
    for dtype in (torch.float32, torch.bfloat16):
        name, model = str(dtype).removeprefix("torch."), build_llama(SMOL, torch.device("cpu"), dtype)
        for batch, prompt_tokens in [*((batch, TOKENS) for batch in BATCHES), (8, LONG)]:
            seconds, price = compare(model, batch, prompt_tokens, repeats=options.repeats if batch == 1 else 1)
            tokens_per_s = batch * TOKENS / seconds
            report.add_row(dtype=name, batch=batch, prompt=prompt_tokens, plain_tokens_per_s=tokens_per_s, price=price)
        changed = count_changed(model)
        report.settings[f"responses that changed in {name}, without and with"] = list(changed.values())
        report.require_at_most(f"{name}: responses that changed", changed[True], 0)
    return report.finish(options)


if __name__ == "__main__":
    sys.exit(main())
