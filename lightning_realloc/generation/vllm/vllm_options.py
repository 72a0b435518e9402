"""Options of the engine ``"vllm"``: where vLLM is, and how it is started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal

from lightning_realloc.errors import GenerationError
from lightning_realloc.generation.core.params import check_counts, check_kind
from lightning_realloc.limits import VLLM_MEMORY_SHARE
from lightning_realloc.setting_hints import suggest_settings

_SETTINGS = {
    "dtype": "the Trainer's precision=",
    "enable_sleep_mode": "VLLMOptions(sleep=True)",
    "gpu_memory_utilization": "memory_share=",
    "kv_cache_memory_bytes": "GenerationOptions(max_cache_bytes=...)",
    "max_model_len": "max_length=",
    "max_num_seqs": "max_slots of the generating call in the plan",
    "pipeline_parallel_size": "tp or dp in the layout of the generating call in the plan, such as tp2",
    "quantization": "VLLMOptions(quantization=...)",
    "speculative_config": "speculation=Speculation() with engine='native'",
    "tensor_parallel_size": "tp in the layout of the generating call in the plan, such as tp2",
}
"""Arguments of `vllm.LLM` that are given elsewhere -> our setting."""
_OWN_ARGUMENTS = {
    "model",
    "tokenizer",
    "skip_tokenizer_init",
    "load_format",
    "logprobs_mode",
    "weight_transfer_config",
    "distributed_executor_backend",
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
}
"""Further arguments of `vllm.LLM` that follow from the run, or would break it."""
QUANTIZATIONS = {"fp8": "fp8_per_channel", "int8": "int8_per_channel_weight_only"}
"""Quantization -> vLLM's name of the scheme that it makes from weights in 16 bits."""


@suggest_settings(_SETTINGS | {"enforce_eager": "VLLMOptions(arguments={'enforce_eager': True})"})
@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMOptions:
    """How to reach vLLM: a process next to each generating rank, or a running server.

    Example:
        ``GRPO(actor, reward, engine="vllm", generation=GenerationOptions(vllm=VLLMOptions(restarts=1)))``
    """

    python: str | None = None
    """Interpreter of an environment with vLLM; None: the variable VLLM_PYTHON, else the interpreter of the run."""
    address: str | None = None
    """Address of a running server, such as ``"http://127.0.0.1:8000"``, in place of a process; None: a process."""
    weights_folder: str | None = None
    """Folder that this rank and the server see, for handing weights over; None: in this machine's shared memory."""
    restarts: int | None = None
    """Times that vLLM is started again after it has ended or stopped responding; its open requests are repeated. None:
    once, and never for a server, which the run did not start."""
    timeout_s: float = 600.0
    """Most seconds without a sign of life from vLLM, also while it starts."""
    merge_adapters: bool = False
    """Whether vLLM gets whole weights with merged adapters at every update, in place of the base once and adapters
    alone: for adapters that vLLM does not have, and for a server."""
    quantization: Literal["fp8", "int8"] | None = None
    """How vLLM rounds its copy of 16-bit weights: ``"fp8"`` linear layers and their inputs, ``"int8"`` weights of
    experts; None: not at all."""
    sleep: bool = False
    """Whether vLLM frees its device's memory between generating calls; needs a GPU."""
    memory_share: float = VLLM_MEMORY_SHARE
    """Share of the device's memory for weights, keys and values, if no ``max_cache_bytes`` is given."""
    max_length: int | None = None
    """Most tokens of prompt and response that vLLM makes room for; None: the model's context."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `vllm.LLM`, such as ``{"enforce_eager": True}``."""

    def __post_init__(self) -> None:
        for name in ("python", "address", "weights_folder"):
            check_kind(name, getattr(self, name), str, "text", optional=True)
        check_kind("restarts", self.restarts, Integral, "a whole number", optional=True)
        if self.quantization not in (None, *QUANTIZATIONS):
            raise GenerationError(
                f"quantization={self.quantization!r} must be None or one of {', '.join(QUANTIZATIONS)}"
            )
        for name in ("sleep", "merge_adapters"):
            check_kind(name, getattr(self, name), bool, "True or False")
        check_counts(Real, timeout_s=self.timeout_s)
        check_counts(optional=True, max_length=self.max_length)
        check_kind("memory_share", self.memory_share, Real, "a number")
        check_kind("arguments", self.arguments, Mapping, "a mapping")
        if self.restarts is not None and self.restarts < 0:
            raise GenerationError(f"restarts={self.restarts} must be at least 0")
        if not 0 < self.memory_share <= 1:
            raise GenerationError(f"memory_share={self.memory_share} must lie in (0, 1]")
        if self.address is not None:
            self._check_server()
        for name in sorted(self.arguments):
            if name in _SETTINGS:
                raise GenerationError(f"arguments={dict(self.arguments)} holds {name}; here it is {_SETTINGS[name]}")
            if name in _OWN_ARGUMENTS:
                raise GenerationError(
                    f"arguments={dict(self.arguments)} holds {name}, which follows from the model, the plan and other "
                    f"options; leave it out"
                )

    @property
    def num_restarts(self) -> int:
        """Times that vLLM is started again."""
        return (1 if self.address is None else 0) if self.restarts is None else self.restarts

    def _check_server(self) -> None:
        assert self.address is not None
        if not self.address.startswith(("http://", "https://")):
            raise GenerationError(f"address={self.address!r} must begin with http:// or https://")
        for name in ("python", "arguments", "max_length", "quantization"):
            if getattr(self, name):
                raise GenerationError(
                    f"{name}={getattr(self, name)!r} is for a process that the run starts, and address={self.address!r}"
                    f" names a running server; leave one of the two out"
                )
        if self.restarts:
            raise GenerationError(
                f"restarts={self.restarts} start a process again, and address={self.address!r} names a server that "
                f"this run did not start; leave restarts out"
            )
