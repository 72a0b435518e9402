"""Numbers and names that a run and its estimates share, so that both change together.

Each number was chosen by a benchmark of `docs/benchmarks/generation.md` unless it says otherwise.
"""

from __future__ import annotations

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names of the number of experts in Hugging Face configs."""
PROJECTOR_NAMES = "connector|merger|newline|projector"
"""Pattern of transformers' names of modules and parameters between a tower and the language model."""
CACHE_MULTIPLE = 32
"""Positions that the capacity of an unbounded cache is rounded up to. More: fewer copies, and more unused memory."""
MAX_PREFILL_TOKENS = 8192
"""Prompt tokens that one generation step reads, by default. More: fewer steps, and larger activations."""
PAGE_SIZE = 16
"""Positions of a cache page. More: fewer pages to keep, and more unused positions at a sequence's end."""
BUFFER_SHARE = 8
"""A bounded cache keeps at least 1/8 of its bytes as the buffer that gathered pages are copied to."""
MIN_PACKED_STEPS = 32
"""Response tokens from which on packing a linear layer's weights for oneDNN saves more time than it costs."""
MIN_PACKED_FLOAT32_WEIGHTS = 512 * 512
"""Weights of a float32 layer from which on packing it is faster; in bfloat16 it always is."""
READING_THE_SAME = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers of these names share one product where they are called with the same tensor."""
ABSORBED_PROJECTION = "kv_b_proj"
"""Linear layer that expands latents to keys and values, and that decoding absorbs into queries and outputs."""
VLLM_CPU_CACHE_BYTES = 1 << 30
"""Keys and values of a vLLM on CPU without ``max_cache_bytes``: a share of the host's memory would be too much."""
VLLM_CHUNK_BYTES = 256 << 20
"""Weights in the shared memory through which vLLM gets them. More: fewer messages, and more memory next to both."""
VLLM_MEMORY_SHARE = 0.3
"""Fraction of a GPU's memory that vLLM takes by default, without ``max_cache_bytes``."""
DEFAULT_MICRO_BATCH_TOKENS = 8192
"""Tokens of a forward pass outside of generation. More: fewer and larger products, and more memory for activations."""
MICRO_BATCH_TOKENS = {"cpu": 2048}
"""The same on some types of device: a core is busy with few tokens, and activations leave its cache with many
(`docs/benchmarks/real_model.md`)."""
DISTILLATION_TOKENS = 1024
"""Tokens of a batch that a draft model learns from in one step."""
TILE_ELEMENTS = 1 << 26
"""Logits of a tile (256 MiB in fp32); fewer are computed whole. Raising it takes more memory, and adds up gradients of
the head's weight less often."""
CHUNK_ELEMENTS = 1 << 23
"""Logits converted to fp32 at a time (32 MiB). Raising it takes more memory and fewer kernel launches."""
MAX_CAPTURED_TOKENS = 512
"""Tokens of the largest decoding step that is captured as a CUDA graph, padding included. Larger steps keep the device
busy for longer than launching takes."""
INVARIANT_TILE = {"cpu": 16, "default": 64}
"""Tokens of every forward under ``batch_invariant``, by device type. More: prompts are read faster, and a step of few
samples takes longer. Reading a GPU's weights takes longer than computing 64 tokens."""
INVARIANT_BLOCK = 64
"""Positions that attention reads at a time there. More: fewer and larger reads, and more unused ones."""
VECTOR_VALUES = 16
"""Most values that torch's CPU kernels compute at a time; what is left over is computed otherwise."""
THREAD_VALUES = 32768
"""Values of an elementwise function from which on torch uses one more thread (``at::internal::GRAIN_SIZE``)."""
GATHERED_SUM_BYTES = 256 << 10
"""Bytes up to which CPU ranks sum tensors by gather and add: gloo's all-reduce takes twice as long as its gather."""
MAX_STAGING_BYTES = 32 << 20
"""Staging memory of the direct transport in each direction; both together are one bucket of 64 MB. Measured with 254M
parameters over gloo, twice as much is no faster (`docs/benchmarks/reallocation.md`)."""
PACK_BELOW_BYTES = 64 << 10
"""Pieces of weights below this size are packed into one message per peer and round, because a copy costs less than a
message."""
MAX_MOVING_BYTES = 256 << 20
"""Offloaded activations whose copies may be under way in each direction. Raising it hides slower copies, and takes
memory."""
TILED_ROWS_PER_WIDTH = 2
"""Rows of logits for each feature of a hidden state, up to which the logits of a trained head are computed whole: the
gradients of its weight, of a tile and summed, take more memory than so few logits."""


def is_tiled(num_rows: float, num_columns: float, trained_width: int) -> bool:
    """Return whether logits are computed in tiles.

    Args:
        num_rows: Tokens that logits are computed for.
        num_columns: Columns that a rank computes.
        trained_width: Width of hidden states; 0 if the head's weight is frozen, or without a backward pass.
    """
    return num_rows * num_columns > TILE_ELEMENTS and num_rows > TILED_ROWS_PER_WIDTH * trained_width
