"""Protocols of an algorithm whose calls can be run, besides the methods that its calls name: settings and models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import nn
from transformers import PreTrainedConfig

from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.generation.core.capabilities import CAPABILITIES
from lightning_realloc.generation.engine_parts import CudaGraphs

if TYPE_CHECKING:
    from lightning_realloc.generation import Speculation, VLLMOptions


class EngineOptions(Protocol):
    """Options of generation that engines and forecasts of memory read; `GenerationOptions` documents them."""

    @property
    def vllm(self) -> VLLMOptions | None: ...
    @property
    def compile(self) -> str | None: ...
    @property
    def cuda_graphs(self) -> CudaGraphs: ...
    @property
    def free_cache(self) -> bool | Literal["auto"]: ...
    @property
    def batch_invariant(self) -> bool: ...
    @property
    def router_replay(self) -> bool: ...
    @property
    def max_cache_bytes(self) -> int | None: ...
    @property
    def sample_reallocation(self) -> bool | Literal["queued", "all"]: ...


class RunnableAlgorithm(Protocol):
    """An algorithm as the call runner sees it; `MultiModelModule` is one, and documents the settings."""

    @property
    def trainer(self) -> Any: ...
    @property
    def group_size(self) -> int: ...
    @property
    def share_prompts(self) -> bool: ...
    @property
    def totals_of(self) -> tuple[str, ...]: ...
    @property
    def excluded_by(self) -> tuple[str, ...]: ...
    @property
    def dropout(self) -> bool: ...
    @property
    def seed(self) -> int: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def engine(self) -> str: ...
    @property
    def generation_options(self) -> EngineOptions: ...
    @property
    def speculation(self) -> Speculation | None: ...
    @property
    def has_environment(self) -> bool: ...
    def train_options_of(self, role: str) -> TrainOptions: ...
    def tokenizer_of(self, role: str) -> Any: ...


class ModelRole(Protocol):
    """A frozen dataclass of one model of an algorithm, as it is measured; `Role` is one, and documents the members."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def task(self) -> str: ...
    @property
    def trained(self) -> bool: ...
    def config(self) -> PreTrainedConfig | None: ...
    def describe(self) -> nn.Module: ...
    def describe_adapters(self) -> tuple[Any, ...]: ...
    def resembling(self, config: PreTrainedConfig) -> ModelRole: ...
    def build(self, *, seed: int) -> nn.Module: ...


def option_without_lockstep(algorithm: RunnableAlgorithm) -> str | None:
    """Return an option of generation that ranks cannot follow which run each block together; None if there is none.

    The text continues "cannot ...".
    """
    speculation = algorithm.speculation
    if "sharded" not in CAPABILITIES[algorithm.engine]:
        return f"generate by engine={algorithm.engine!r}"
    if algorithm.generation_options.batch_invariant:
        return "generate with batch_invariant=True"
    drafts = speculation is not None and speculation.drafter == "blocks"
    return "draft by its own first blocks" if drafts else None


def option_without_stages(algorithm: RunnableAlgorithm) -> str | None:
    """Return an option, with its value, that needs all layers of a model on a rank; None if stages can generate."""
    options, speculation = algorithm.generation_options, algorithm.speculation
    asked = {
        f"engine={algorithm.engine!r}": "stages" not in CAPABILITIES[algorithm.engine],
        "batch_invariant=True": options.batch_invariant,
        "drafting by the first blocks": speculation is not None and speculation.drafter == "blocks",
    }
    return next((option for option, is_set in asked.items() if is_set), None)
