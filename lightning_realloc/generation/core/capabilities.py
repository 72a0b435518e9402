"""Capabilities of the generation engines, and the refusal of options that need one which an engine lacks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from lightning_realloc.errors import ReallocError

EngineName = Literal["native", "hf", "vllm"]
"""Generation engine: ``native`` is continuous batching, ``hf`` the model's own ``generate``, ``vllm`` vLLM in a process
of its own."""

Capability = Literal[
    "batch_invariant", "budget", "cache_bound", "captures", "drafts", "environment", "extra_inputs", "keeps_cache",
    "moves", "partners", "records_experts", "same_logprobs", "sharded", "stages", "stream", "tensor_parallel", "vllm",
]  # fmt: skip

_MEANINGS: Mapping[Capability, str] = {
    "batch_invariant": "gives a response the same bits in any batch",
    "budget": "stops at a budget and continues its responses later",
    "cache_bound": "bounds the bytes of its cache",
    "captures": "captures its steps as CUDA graphs",
    "drafts": "drafts tokens",
    "environment": "asks an environment between turns",
    "extra_inputs": "passes further inputs to the model",
    "keeps_cache": "leaves its cache to us between calls",
    "moves": "hands samples over to other ranks",
    "partners": "lets environments talk to models",
    "records_experts": "records the experts of its tokens",
    "same_logprobs": "computes log-probabilities as training does",
    "sharded": "runs where all ranks run a model's blocks together",
    "stages": "runs a model in pipeline stages",
    "stream": "reports tokens while it generates",
    "tensor_parallel": "runs a model that tensor parallelism divides",
    "vllm": "runs vLLM",
}

CAPABILITIES: Mapping[str, frozenset[Capability]] = {
    "native": frozenset(_MEANINGS) - {"vllm"},
    "hf": frozenset({"environment", "extra_inputs", "partners", "same_logprobs", "tensor_parallel"}),
    "vllm": frozenset({"budget", "cache_bound", "environment", "tensor_parallel", "vllm"}),
}
"""Engine -> its capabilities."""

_NATIVE_SETTINGS = (
    "batch_invariant", "clock", "compile", "cuda_graphs", "drafter", "lockstep", "max_cache_bytes",
    "max_prefill_tokens", "pack_weights", "peers", "poll_weights", "speculation", "wall_clock",
)  # fmt: skip
NATIVE_HINTS = {name: f"GenerationEngine({name}=...), the engine 'native'" for name in _NATIVE_SETTINGS}
"""Setting of the native engine's constructor -> hint for the other engines', which have no such setting."""


def require_capability(
    capability: Capability,
    asked: str,
    *,
    engine: str,
    error: type[ReallocError],
    capabilities: Collection[Capability] | None = None,
) -> None:
    """Raise ``error`` if an engine lacks the capability that an option needs; ``asked`` is the option with its value.

    ``capabilities`` are the engine's; None: those of `CAPABILITIES`.
    """
    if capability in (CAPABILITIES[engine] if capabilities is None else capabilities):
        return
    able = [f"engine={other!r}" for other, known in CAPABILITIES.items() if capability in known]
    raise error(
        f"{asked} needs an engine that {_MEANINGS[capability]}, and engine={engine!r} does not; leave it out, or use "
        f"{' or '.join(able)}"
    )
