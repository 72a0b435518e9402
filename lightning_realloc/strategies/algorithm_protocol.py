"""Protocols of an algorithm whose calls can be run, besides the methods that its calls name: settings and models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from torch import nn
from transformers import PreTrainedConfig

from lightning_realloc.batch.training import TrainOptions
from lightning_realloc.generation.engine_parts import CudaGraphs

if TYPE_CHECKING:
    from lightning_realloc.generation import Speculation, VLLMOptions


class EngineOptions(Protocol):
    """Options of generation that one engine reads alone."""

    @property
    def vllm(self) -> VLLMOptions | None:
        """Options of the engine ``"vllm"``; None: the defaults."""

    @property
    def compile(self) -> str | None:
        """Backend of ``torch.compile`` for captured steps of the engine ``"native"``; None: none."""

    @property
    def cuda_graphs(self) -> CudaGraphs:
        """Decoding steps of the engine ``"native"`` that are captured."""

    @property
    def free_cache(self) -> bool | Literal["auto"]:
        """Whether the engine ``"native"`` frees keys, values and graphs after each generation."""

    @property
    def batch_invariant(self) -> bool:
        """Whether results of the engine ``"native"`` are the same to the last bit in any batch."""


class RunnableAlgorithm(Protocol):
    """An algorithm as the call runner sees it; `MultiModelModule` is one."""

    @property
    def trainer(self) -> Any:
        """The Trainer that runs the algorithm."""

    @property
    def group_size(self) -> int:
        """Samples next to each other that stay together."""

    @property
    def share_prompts(self) -> bool:
        """Whether a pack may hold a prompt once for several samples."""

    @property
    def totals_of(self) -> tuple[str, ...]:
        """Columns whose sums over a mini-batch the losses divide by."""

    @property
    def excluded_by(self) -> tuple[str, ...]:
        """Columns whose NaN excludes a sample from the losses that need them."""

    @property
    def dropout(self) -> bool:
        """Whether dropout is active in training."""

    @property
    def seed(self) -> int:
        """Seed of dropout and of the order of mini-batches, the same on every rank."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that engines read special tokens from."""

    @property
    def engine(self) -> str:
        """Name of the generation engine: ``"native"``, ``"hf"`` or ``"vllm"``."""

    @property
    def generation_options(self) -> EngineOptions:
        """All options of generation, with those of single engines."""

    @property
    def speculation(self) -> Speculation | None:
        """Settings of speculative decoding; None: one token at a time."""

    @property
    def max_cache_bytes(self) -> int | None:
        """Most bytes of keys and values per rank; None: as many as the longest samples take."""

    @property
    def sample_reallocation(self) -> bool | Literal["queued", "all"]:
        """Samples that may move between data-parallel ranks while they are generated; False: none."""

    def train_options_of(self, role: str) -> TrainOptions:
        """Return how a role goes through its samples."""


class ModelRole(Protocol):
    """A frozen dataclass of one model of an algorithm, as it is measured; `Role` is one."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str:
        """The role."""

    @property
    def task(self) -> str:
        """Head of the model: next-token logits, or one score per sequence or token."""

    @property
    def trained(self) -> bool:
        """Whether an optimizer updates the weights."""

    def config(self) -> PreTrainedConfig | None:
        """Return the model's configuration; None for a module without one."""

    def describe(self) -> nn.Module:
        """Return the model without weights."""

    def describe_adapters(self) -> tuple[Any, ...]:
        """Return the adapter options that affect the time of passes."""

    def resembling(self, config: PreTrainedConfig) -> ModelRole:
        """Return a role of another size with random weights, and adapters of the same kind."""

    def build(self, *, seed: int) -> nn.Module:
        """Return the model with full weights."""
