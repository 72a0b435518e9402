"""Group of settings for generation: memory, CUDA graphs, sample reallocation and budget of the rollout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import TYPE_CHECKING, Literal, get_args

from lightning_realloc.algorithms.settings import check_type
from lightning_realloc.batch.training import check_compile_backend
from lightning_realloc.errors import ConfigError, require_choice
from lightning_realloc.generation import RolloutBudget
from lightning_realloc.generation.core.capabilities import Capability, EngineName, require_capability
from lightning_realloc.generation.engine_parts import CudaGraphs
from lightning_realloc.setting_hints import GENERATION_HINTS, suggest_settings

if TYPE_CHECKING:
    from lightning_realloc.generation import Speculation, VLLMOptions

FreeCache = bool | Literal["auto"]
"""When the memory of a generation's cache and CUDA graphs is freed: ``"auto"``, where other calls need it; True, after
each generation; False, not before memory runs out."""
SampleReallocation = bool | Literal["queued", "all"]
"""Samples that may move between ranks: False, none; True or ``"queued"``, those that wait for a slot; ``"all"``,
running ones as well."""


@suggest_settings(GENERATION_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationOptions:
    """Options of generation that do not change which tokens are sampled; ``sampling`` does.

    Example:
        ``GRPO(actor, reward, speculation=Speculation(), generation=GenerationOptions(max_cache_bytes=8 << 30))``
    """

    vllm: VLLMOptions | None = None
    """Where the engine ``"vllm"`` is, and how it is started; None: the defaults."""
    max_cache_bytes: int | None = None
    """Bound on the bytes of keys and values per rank; further samples wait. None: room for ``max_slots`` of the
    longest sample, and with an environment for as many that wait for it."""
    free_cache: FreeCache = "auto"
    """Whether the memory of keys, values and CUDA graphs is freed after each generation. False keeps it for the next
    one, which then captures no steps anew; the other calls have that much less memory. ``"auto"`` keeps it on GPUs
    whose memory suffices by the forecast for the longest samples, if nothing is offloaded. A resumed run has other last
    bits where it stays, so ``Trainer(deterministic=True)`` frees it."""
    sample_reallocation: SampleReallocation = False
    """Whether samples move between data-parallel ranks so that all ranks finish together. True or ``"queued"``: samples
    that wait for a slot; ``"all"``: running ones as well, with their keys and values, which pipelines compute again.
    Tokens stay the same."""
    compile: str | None = None
    """Backend of ``torch.compile`` for the blocks of decoding steps that are captured as CUDA graphs, such as
    ``"inductor"``: fewer kernels, other rounding, and the seconds of one compilation. None: none. Without effect on
    CPU."""
    cuda_graphs: CudaGraphs = True
    """Whether decoding steps are captured as CUDA graphs, each of which is one launch. ``"collective"``: also those of
    tensor-parallel layouts, with NCCL's collectives inside; not tried on several GPUs yet. False: none, which saves
    their memory. Without effect on CPU, and with ``fsdp > 1`` or ``pp > 1``."""
    batch_invariant: bool = False
    """Whether a sample's tokens and log-probabilities have the same bits whatever else is generated, in whatever slots
    and chunks, and with any drafts under ``verification="match"``. Every forward then has one shape, which is slower.
    Needs layouts with ``fsdp=1``, and a model without experts."""
    router_replay: bool = False
    """Whether training, and inference by the trained model, give the tokens of a mixture of experts the experts that
    they had in generation, with weights and gradients of the current router. Known as rollout routing replay (R3)."""
    rollout_budget: RolloutBudget | None = None
    """Tokens or seconds of an iteration's generation; unfinished responses continue in the next one. None: no limit."""

    def __post_init__(self) -> None:
        if self.vllm is not None:
            from lightning_realloc.generation.vllm.vllm_options import VLLMOptions

            check_type(VLLMOptions, vllm=self.vllm)
        check_type(RolloutBudget, rollout_budget=self.rollout_budget)
        check_type(Real, max_cache_bytes=self.max_cache_bytes)
        check_type(bool, batch_invariant=self.batch_invariant, router_replay=self.router_replay)
        _check_sample_reallocation(self.sample_reallocation)
        if self.cuda_graphs not in (True, False, "collective"):
            raise ConfigError(f'cuda_graphs={self.cuda_graphs!r} must be True, False or "collective"')
        if not isinstance(self.free_cache, bool) and self.free_cache != "auto":
            raise ConfigError(f'free_cache={self.free_cache!r} must be True, False or "auto"')
        if self.compile is not None:
            check_compile_backend(self.compile)
        if self.batch_invariant and self.compile is not None:
            raise ConfigError(
                f"batch_invariant=True captures no steps that compile={self.compile!r} could compile; leave one of "
                f"them out"
            )
        if self.max_cache_bytes is not None and not 1 <= self.max_cache_bytes < math.inf:
            raise ConfigError(
                f"max_cache_bytes={self.max_cache_bytes} must be at least 1 and finite; leave it out for no bound"
            )
        if self.rollout_budget is not None and self.sample_reallocation:
            raise ConfigError(
                f"rollout_budget cannot be used with sample_reallocation={self.sample_reallocation!r}: ranks stop on "
                f"their own, and keep their samples until then; leave one of the two out"
            )
        if self.rollout_budget is not None and self.vllm is not None and self.vllm.address is not None:
            raise ConfigError(
                f"rollout_budget cuts responses, and the server {self.vllm.address} returns whole ones; leave address "
                f"out for a process of the run's own, or leave rollout_budget out"
            )


_NEEDS: Mapping[str, Capability] = {
    "vllm": "vllm",
    "max_cache_bytes": "cache_bound",
    "free_cache": "keeps_cache",
    "sample_reallocation": "moves",
    "compile": "captures",
    "cuda_graphs": "captures",
    "batch_invariant": "batch_invariant",
    "router_replay": "records_experts",
    "rollout_budget": "budget",
}
"""Option -> the capability that it needs of the engine, unless it has its default."""
_NEED_NOTHING = (("free_cache", True), ("sample_reallocation", None))
"""Further values that every engine can follow."""


def check_engine(engine: EngineName, options: GenerationOptions, speculation: Speculation | None) -> None:
    """Raise ConfigError for an unknown engine, and for settings that need a capability which the engine lacks."""
    require_choice("engine", engine, get_args(EngineName))
    if speculation is not None:
        from lightning_realloc.generation.speculative.config import Speculation

        check_type(Speculation, speculation=speculation)
        require_capability("drafts", f"speculation={speculation!r}", engine=engine, error=ConfigError)
    for field in fields(options):
        value, capability = getattr(options, field.name), _NEEDS.get(field.name)
        if capability is None or value == field.default or (field.name, value) in _NEED_NOTHING:
            continue
        require_capability(capability, f"{field.name}={value!r}", engine=engine, error=ConfigError)


def _check_sample_reallocation(value: object) -> None:
    if value not in ("queued", "all", None) and not isinstance(value, bool):
        raise ConfigError(
            f"sample_reallocation={value!r} is a {type(value).__name__}; write True or False, 'queued' or 'all'"
        )
