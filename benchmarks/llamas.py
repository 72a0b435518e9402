"""Llamas in the shapes of published models with random weights: sizes, bytes and floating-point operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

VOCABULARY = 128256


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama."""

    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    head_dim: int
    tied: bool
    num_kv_heads: int = 8
    vocabulary: int = VOCABULARY
    max_length: int = 4096
    """Positions of its context."""

    def config(self, dtype: torch.dtype) -> LlamaConfig:
        """Return the configuration of transformers."""
        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden_size, intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_blocks, num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads, head_dim=self.head_dim, max_position_embeddings=self.max_length,
            tie_word_embeddings=self.tied, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            dtype=str(dtype).removeprefix("torch."), attn_implementation="sdpa",
        )  # fmt: skip

    @property
    def block_weights(self) -> int:
        """Weights of the matrices of all blocks."""
        attention = self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_blocks * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def read_weights(self) -> int:
        """Weights that one decoding step reads: those of blocks and head. An embedding is read row by row."""
        return self.block_weights + self.hidden_size * self.vocabulary

    def cache_bytes(self, num_positions: int, dtype: torch.dtype) -> int:
        """Return the bytes of keys and values of so many positions."""
        return 2 * self.num_blocks * self.num_kv_heads * self.head_dim * num_positions * dtype.itemsize

    def forward_flops(self, lengths: Sequence[int], *, num_outputs: int) -> float:
        """Return the operations of a forward pass over whole sequences with causal attention.

        Args:
            lengths: Tokens of each sequence.
            num_outputs: Tokens whose logits are computed.
        """
        matrices = 2.0 * self.block_weights * sum(lengths) + 2.0 * self.hidden_size * self.vocabulary * num_outputs
        # Scores and weighted values take 2 * head_dim operations each, for half of all pairs of positions.
        pairs = sum(length * (length + 1) / 2 for length in lengths)
        return matrices + 4.0 * self.num_blocks * self.num_heads * self.head_dim * pairs


SHAPES = {
    "1b": Shape(2048, 8192, 16, 32, 64, tied=True),
    "8b": Shape(4096, 14336, 32, 32, 128, tied=False),
}


def build_llama(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """Return a frozen Llama with random weights, drawn on the device."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM._from_config(shape.config(dtype))
    return model.to(dtype).eval().requires_grad_(False)
