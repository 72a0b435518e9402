"""What does a model's shape add to its parameters, for working out activations and caches? Pure numbers.

Activations are those of the Llama family's blocks as transformers computes them; other families are described by the
few ways in which theirs differ. How far that carries is measured in ``docs/memory.md``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_realloc.errors import PlanError
from lightning_realloc.layout.model import ModelSpec
from lightning_realloc.tuning.shapes.experts import Experts

# ReLU keeps its result alone, which the next projection keeps too; this GELU is written out in seven operations.
_ACTIVATION_COPIES = {"relu": -1, "gelu_new": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder that its activations depend on."""

    num_layers: int
    hidden: int
    """D, features of a hidden state."""
    intermediate: int
    """Features inside the MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_outputs: int
    """Of the head, per token: the vocabulary, or one score."""
    gated: bool = True
    """Whether the MLP multiplies two projections."""
    rms_norm: bool = True
    """Whether norms are written out (RMSNorm), and so keep a second copy; LayerNorm is one kernel."""
    qk_norm: bool = False
    """Whether queries and keys are normalised by head."""
    activation_copies: int = 0
    """MLP features that the activation function keeps more often, or less, than a kernel that keeps its input."""
    experts: Experts | None = None
    """What most blocks, or all, have in the MLP's place."""

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads", "head_dim", "num_outputs"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name}={getattr(self, name)} of a model's shape must be at least 1; see its config")

    @classmethod
    def read(cls, config: Any, model: ModelSpec, *, num_outputs: int | None = None) -> ModelShape:
        """Read a Hugging Face config; what it does not tell is read from the names of the parameters.

        ``num_outputs`` is by default the vocabulary.

        Raises:
            PlanError: for a config that does not have the sizes of a decoder.
        """
        text = config.get_text_config()
        hidden, heads = _size(text, "hidden_size"), _size(text, "num_attention_heads")
        names = [param.name for param in model.params if param.section == "block"]
        norms = [name for name in names if "norm" in name or ".ln_" in name]
        return cls(
            num_layers=_size(text, "num_hidden_layers"),
            hidden=hidden,
            intermediate=_size(text, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            num_heads=heads,
            num_kv_heads=_size(text, "num_key_value_heads", default=heads),
            head_dim=_size(text, "head_dim", default=hidden // heads),
            num_outputs=num_outputs or _size(text, "vocab_size"),
            gated=any("gate" in name for name in names),
            rms_norm=not any(name.endswith(".bias") for name in norms),
            qk_norm=any("q_norm" in name for name in names),
            activation_copies=_ACTIVATION_COPIES.get(
                str(getattr(text, "hidden_act", None) or getattr(text, "activation_function", "")), 0
            ),
            experts=Experts.read(text, model),
        )

    @property
    def queries(self) -> int:
        """Features of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Features of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    def kv_cache_elements(self, tp: int) -> int:
        """Elements that one position of one sequence takes in the cache of one of ``tp`` ranks."""
        return 2 * self.num_layers * max(1, self.num_kv_heads // tp) * self.head_dim

    def saved_bytes(self, tp: int, element_bytes: int) -> int:
        """Bytes per token that one block keeps from its forward to its backward pass, on one of ``tp`` ranks.

        Hidden states are whole on every rank: of each of two norms what goes in and what comes out and, where it is
        written out, what is multiplied by its weight; RMSNorm takes its input in fp32. Heads and MLP features are
        divided: queries and keys after rotation, values, the attention's result and its transposed copy; of a gated
        MLP both projections, the activation and the product.
        """
        norm = 4 + 2 * element_bytes if self.rms_norm else 2 * element_bytes
        heads = (3 + 2 * self.qk_norm) * self.queries / tp + (2 + 2 * self.qk_norm) * self._local_keys(tp)
        return int(2 * norm * self.hidden + element_bytes * (heads + self._mlp_saved(tp)))

    def working_elements(self, tp: int) -> int:
        """Elements per token that a block's forward pass holds at most at a time, when nothing is kept."""
        attention = 3 * self.queries / tp + 3 * self._local_keys(tp)
        copies = (3 if self.gated else 2) + max(0, self.activation_copies)
        mlp = copies * self.intermediate / tp
        if self.experts is not None:
            # Its tokens sorted by expert stay to the end; both projections are one tensor until their product is there.
            each, moved = self.experts.of_one(tp), self.experts.per_token
            routed = moved * max(self.hidden + (copies + self.gated) * each, 4 * self.hidden)
            mlp = max(routed, copies * self.experts.of_shared(tp))
        return int(4 * self.hidden + max(attention, mlp))

    def backward_elements(self, tp: int) -> int:
        """Elements per token of the gradients that a block's backward pass holds beyond what it has freed by then."""
        mlp = (2 if self.gated else 1) * self.intermediate / tp
        if self.experts is not None:
            each, moved = self.experts.of_one(tp), self.experts.per_token
            mlp = moved * max((2 if self.gated else 1) * each, 3 * self.hidden)
        return int(2 * self.hidden + max(mlp, self.queries / tp + 2 * self._local_keys(tp)))

    def _mlp_saved(self, tp: int) -> float:
        """Elements per token that a block keeps of its MLP, or its experts, as a mean over blocks.

        Experts keep what goes into them, a hidden state for each, and what comes out, which is multiplied by the
        router's weight.
        """
        copies = (4 if self.gated else 2) + self.activation_copies
        dense = copies * self.intermediate / tp
        if self.experts is None:
            return dense
        routed = self.experts.per_token * (2 * self.hidden + copies * self.experts.of_one(tp))
        mixture = routed + copies * self.experts.of_shared(tp) + self.experts.count
        return self.experts.per_block(self.num_layers, mixture, dense)

    def _local_keys(self, tp: int) -> float:
        return max(1, self.num_kv_heads // tp) * self.head_dim


def _size(config: Any, *names: str, default: int | None = None) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    if default is None:
        raise PlanError(
            f"{type(config).__name__} has no {names[0]}, which the memory of activations is worked out from; "
            f"use a decoder's config"
        )
    return default
