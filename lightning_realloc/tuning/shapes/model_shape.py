"""Sizes of a decoder from which the memory of activations and caches follows. Pure arithmetic.

Activations are those of Llama blocks as transformers computes them; a few fields describe how other families differ.
``docs/benchmarks/memory.md`` has measurements of how accurate that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cuts import group_bounds, head_bounds, num_head_shares
from lightning_realloc.layout.dims import ParallelDims
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.shapes.experts import Experts, read_size

ACTIVATION_COPIES = {"relu": -1, "gelu_new": 3, "quick_gelu": 1}
"""See `ModelShape.activation_copies`. ReLU keeps only its result, which the next projection keeps anyway. "gelu_new"
consists of seven operations, "quick_gelu" of three."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Low-rank projections of multi-head latent attention. Source: DeepSeek-V2, arXiv:2405.04434, section 2.1."""

    query_rank: int | None
    """Features between the two projections of queries; None: one projection."""
    key_rank: int
    """Features from which keys and values are projected."""
    query_width: int
    """Features of a head's query and key."""
    value_width: int
    """Features of a head's value."""
    rotary: int
    """Features of a key that all heads share, and that rotate."""
    is_cached: bool = False
    """Whether generation keeps latents and rotary features, in place of the keys and values of all heads."""

    @classmethod
    def from_config(cls, config: Any, *, is_cached: bool = False) -> Latent | None:
        """Read a Hugging Face config; None without latent attention."""
        key_rank, rotary = read_size(config, "kv_lora_rank"), read_size(config, "qk_rope_head_dim")
        plain, value = read_size(config, "qk_nope_head_dim"), read_size(config, "v_head_dim")
        if key_rank is None or rotary is None or plain is None or value is None:
            return None
        return cls(
            query_rank=read_size(config, "q_lora_rank"),
            key_rank=key_rank,
            query_width=plain + rotary,
            value_width=value,
            rotary=rotary,
            is_cached=is_cached,
        )

    @property
    def mean_width(self) -> int:
        """Mean features of a head's key and value, which scores grow with, and caches without latents."""
        return (self.query_width + self.value_width) // 2

    @property
    def cached_width(self) -> int:
        """Features of a token that one layer keeps, on every tensor-parallel rank, if `is_cached`."""
        return self.key_rank + self.rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder that its activation memory depends on."""

    num_layers: int
    hidden: int
    """Features of a hidden state (D)."""
    intermediate: int
    """Features inside the MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_outputs: int
    """Outputs of the head per token: the vocabulary size, or 1 for a model that scores."""
    gated: bool = True
    """Whether the MLP multiplies two projections (SwiGLU)."""
    rms_norm: bool = True
    """Whether norms are RMSNorm in several operations, which keep a second copy; LayerNorm is one kernel."""
    qk_norm: bool = False
    """Whether queries and keys are normalized per head."""
    activation_copies: int = 0
    """Copies of the MLP's features that the activation function keeps, relative to a kernel that keeps its input."""
    latent: Latent | None = None
    """Ranks of latent attention, whose keys and values are as wide as ``head_dim`` on average; None: none."""
    experts: Experts | None = None
    """Experts in place of the MLP in most or all blocks; None for a dense model."""
    window: int | None = None
    """Last tokens that a token attends to in the layers of a sliding window; None without such layers."""
    num_windowed: int = 0
    """Layers with the sliding window."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "num_outputs"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} of a model's shape must be at least 1; see its config")

    @classmethod
    def from_config(
        cls, config: Any, model: ModelSpec, *, num_outputs: int | None = None, keeps_latents: bool = False
    ) -> ModelShape:
        """Read a Hugging Face config, and the names of the parameters for details that a config does not hold.

        Args:
            num_outputs: Outputs of the head; None: the vocabulary size.
            keeps_latents: See `Latent.is_cached`, which depends on the model's class.

        Raises:
            PlanError: for a config without the sizes of a decoder.
        """
        text = config.get_text_config()
        hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
        latent = Latent.from_config(text, is_cached=keeps_latents)
        window, num_windowed = _sliding_window(text)
        names = [param.name for param in model.params if param.section == "block"]
        norms = [name for name in names if "norm" in name or ".ln_" in name]
        return cls(
            num_layers=_size(text, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(text, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            num_heads=heads,
            num_kv_heads=_size(text, "num_key_value_heads", default=heads),
            head_dim=_size(text, "head_dim", default=hidden // heads) if latent is None else latent.mean_width,
            latent=latent,
            num_outputs=num_outputs or _size(text, "vocab_size"),
            gated=any("gate" in name for name in names),
            rms_norm=not any(name.endswith(".bias") for name in norms),
            qk_norm=any("q_norm" in name for name in names),
            activation_copies=ACTIVATION_COPIES.get(
                str(getattr(text, "hidden_act", None) or getattr(text, "activation_function", "")), 0
            ),
            experts=Experts.from_config(text, model),
            window=window,
            num_windowed=num_windowed,
        )

    def projections(self, tp: int = 1) -> list[tuple[int, int]]:
        """Return inner and outer features of attention's linear layers, on the first of ``tp`` ranks."""
        queries, keys, latent = self.queries(tp), self.keys(tp), self.latent
        if latent is None:
            return [(self.hidden, queries), (self.hidden, keys), (self.hidden, keys), (queries, self.hidden)]
        heads = queries // self.head_dim
        up = [(latent.query_rank, heads * latent.query_width)] if latent.query_rank else []
        down = (self.hidden, latent.query_rank or heads * latent.query_width)
        expanded = heads * (latent.query_width - latent.rotary + latent.value_width)
        joint = [(self.hidden, latent.key_rank + latent.rotary), (latent.key_rank, expanded)]
        return [down, *up, *joint, (heads * latent.value_width, self.hidden)]

    def mean_context(self, context: float) -> float:
        """Return the mean tokens that a token attends to over layers, from that of layers without a window.

        The latter is half of a sequence, of whose tokens those after the window attend to all of the window.
        """
        if self.window is None or 2 * context <= self.window:
            return context
        inside = self.window - self.window**2 / (4 * context)
        return context + self.num_windowed / self.num_layers * (inside - context)

    def queries(self, tp: int = 1) -> int:
        """Return the features of the query heads on the first of ``tp`` ranks, which holds most of them."""
        return head_bounds(self.num_heads, self.num_kv_heads, tp, 0)[1] * self.head_dim

    def keys(self, tp: int = 1) -> int:
        """Return the features of the key heads, and likewise of the value heads, on the first of ``tp`` ranks."""
        return group_bounds(self.num_kv_heads, tp, 0)[1] * self.head_dim

    def row_shares(self, dims: ParallelDims) -> int:
        """Return how many of ``dims.cp`` ranks read the same heads' keys, as others divide the heads."""
        if dims.cp == 1:
            return 1
        return dims.cp // num_head_shares([(self.num_heads, self.num_kv_heads)], dims.cp, dims.tp)

    @property
    def cached_latent(self) -> Latent | None:
        """Latent attention whose latents generation keeps; None where it keeps keys and values of all heads."""
        return None if self.latent is None or not self.latent.is_cached else self.latent

    def kv_cache_elements(self, tp: int) -> int:
        """Return the KV-cache elements of one token on the first of ``tp`` ranks, which has most key-value heads.

        Latents are whole on every rank.
        """
        latent = self.cached_latent
        return self.num_layers * (2 * self.keys(tp) if latent is None else latent.cached_width)

    def saved_bytes(self, tp: int, element_bytes: int) -> int:
        """Return the bytes per token that one block keeps for its backward pass, on the first of ``tp`` ranks.

        Every rank holds whole hidden states: the input and the output of each of two norms and, for RMSNorm, the
        normalized input, in fp32. Heads and MLP features are divided between ranks: queries and keys after rotation,
        values, the attention's output and its transposed copy; and of a gated MLP both projections, the activation
        and the product.
        """
        norm = 4 + 2 * element_bytes if self.rms_norm else 2 * element_bytes
        heads = (3 + 2 * self.qk_norm) * self.queries(tp) + (2 + 2 * self.qk_norm) * self.keys(tp)
        return int(2 * norm * self.hidden + element_bytes * (heads + self._mlp_saved(tp)))

    def working_elements(self, tp: int, ep: int = 1) -> int:
        """Return the peak elements per token of a block's forward pass that keeps nothing.

        Under ``ep``, the tokens received from other ranks live next to those that the experts sort. They are as many as
        a rank sends if all experts are equally popular.
        """
        attention = 3 * self.queries(tp) + 3 * self.keys(tp)
        copies = (3 if self.gated else 2) + max(0, self.activation_copies)
        mlp = copies * self.intermediate / tp
        if self.experts is not None:
            # Tokens sorted by expert live to the end; both projections are one tensor until their product exists.
            each, moved = self.experts.features_on(tp), self.experts.per_token
            arrived = (2 if ep > 1 else 1) * self.hidden
            routed = moved * max(arrived + (copies + self.gated) * each, 4 * self.hidden)
            mlp = max(routed, copies * self.experts.shared_features_on(tp))
        return int(4 * self.hidden + max(attention, mlp))

    def backward_elements(self, tp: int) -> int:
        """Return the gradient elements per token that a block's backward pass holds, less those that it has freed."""
        mlp = (2 if self.gated else 1) * self.intermediate / tp
        if self.experts is not None:
            each, moved = self.experts.features_on(tp), self.experts.per_token
            mlp = moved * max((2 if self.gated else 1) * each, 3 * self.hidden)
        return int(2 * self.hidden + max(mlp, self.queries(tp) + 2 * self.keys(tp)))

    def product_elements(self, tp: int) -> int:
        """Return the elements per token of inputs of a block's linear layers, and of their outputs' gradients.

        Without those of experts, whose gradients never wait for a pass of their own.
        """
        attention = 2 * self.hidden + 2 * self.queries(tp) + 2 * self.keys(tp)
        mlp = 2 * self.hidden + (3 if self.gated else 2) * self.intermediate / tp
        return int(attention + (mlp if self.experts is None else 0))

    def _mlp_saved(self, tp: int) -> float:
        """Return the elements per token that a block keeps of its MLP or its experts, as a mean over blocks.

        Each expert of a token keeps its input, a hidden state, and its output, which the router's weight multiplies.
        """
        copies = (4 if self.gated else 2) + self.activation_copies
        dense = copies * self.intermediate / tp
        if self.experts is None:
            return dense
        routed = self.experts.per_token * (2 * self.hidden + copies * self.experts.features_on(tp))
        mixture = routed + copies * self.experts.shared_features_on(tp) + self.experts.count
        return self.experts.mean_over_blocks(self.num_layers, mixture, dense)


def _sliding_window(config: Any) -> tuple[int | None, int]:
    """Return the sliding window of a Hugging Face config, and the number of its layers; a window of 0 is none."""
    window, kinds = read_size(config, "sliding_window"), getattr(config, "layer_types", None)
    if not window:
        return None, 0
    return window, _size(config, "num_hidden_layers") if kinds is None else list(kinds).count("sliding_attention")


def _size(config: Any, *names: str, default: int | None = None) -> int:
    found = read_size(config, *names)
    size = default if found is None else found
    if size is None:
        raise PlanError(
            f"{type(config).__name__} has no {names[0]}, which the memory of activations depends on; "
            f"use a decoder's config"
        )
    return size
