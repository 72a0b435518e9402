"""How long does one rank compute on one block of a decoder, and on its head? Roofline arithmetic from the shape.

Communication is not in here; ``cost`` adds it, and puts blocks together to calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_realloc.tuning.estimate.hardware import Device
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.model_shape import ModelShape

BACKWARD_ATTENTION = 2.5
"""Backward over forward arithmetic of fused attention, which computes the scores again: five products for two."""
BACKWARD_TRAFFIC = 2.0
"""Backward over forward memory traffic of what is not a matrix product: a gradient for each tensor read."""
LOGIT_PASSES = 4
"""How often fp32 logits are read or written to turn them into logprobs, or into a sample."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """One of ``tp`` ranks. Times in seconds."""

    shape: ModelShape
    tp: int
    device: Device
    element_bytes: int
    """Of a weight and of an activation while it is computed with."""
    _products: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def forward(self, tokens: float, context: float) -> float:
        """Return a block's time for ``tokens`` tokens that attend to ``context`` tokens each, as a mean."""
        return self.products(tokens) + self.device.attention(self._pairs(tokens * context)) + self._elementwise(tokens)

    def backward(self, tokens: float, context: float, *, trained_share: float) -> float:
        """Return the time of the backward pass: gradients of activations, and of the trained share of weights."""
        return (
            (1 + trained_share) * self.products(tokens)
            + BACKWARD_ATTENTION * self.device.attention(self._pairs(tokens * context))
            + BACKWARD_TRAFFIC * self._elementwise(tokens)
        )

    def decode(self, sequences: float, context: float) -> float:
        """Return a block's time for one token of each sequence, whose keys and values are read from the cache."""
        cache = 2 * sequences * context * self._keys * self.element_bytes
        return self.products(sequences) + self.device.stream(cache) + self._elementwise(sequences)

    def head(self, rows: float) -> float:
        """Return the time of logits, or scores, of ``rows`` tokens, without what is made of them."""
        outputs = self.shape.num_outputs / (self.tp if self.shape.num_outputs > 1 else 1)
        return self.device.matmul(rows, self.shape.hidden, outputs, self.element_bytes)

    def logprobs(self, rows: float) -> float:
        """Return the time of turning logits into logprobs: every rank has a share of them."""
        return self.draws(rows) / self.tp

    def draws(self, rows: float) -> float:
        """Return the time of turning logits into samples: every rank has all of them."""
        if self.shape.num_outputs == 1:
            return 0.0
        return self.device.stream(4 * LOGIT_PASSES * rows * self.shape.num_outputs)

    def products(self, rows: float) -> float:
        """Return the time of a block's matrix products; rows count as whole ones."""
        whole = max(1, round(rows))
        if whole not in self._products:
            self._products[whole] = self._matmuls(whole)
        return self._products[whole]

    def _matmuls(self, rows: int) -> float:
        shape, queries = self.shape, self.shape.queries / self.tp
        sizes = [(shape.hidden, queries, 1), (shape.hidden, self._keys, 2), (queries, shape.hidden, 1)]
        attention = sum(n * self.device.matmul(rows, inner, columns, self.element_bytes) for inner, columns, n in sizes)
        dense = self._mlp(rows, shape.intermediate / self.tp)
        if shape.experts is None:
            return attention + dense
        return attention + shape.experts.per_block(shape.num_layers, self._mixture(rows, shape.experts), dense)

    def _mlp(self, rows: float, features: float, *, num_products: float = 1.0) -> float:
        """Return the time of the matrix products of an MLP, or of several that are alike."""
        if features == 0:
            return 0.0
        up, down = (
            self.device.matmul(rows, inner, columns, self.element_bytes, num_products=num_products)
            for inner, columns in ((self.shape.hidden, features), (features, self.shape.hidden))
        )
        return (2 if self.shape.gated else 1) * up + down

    def _mixture(self, rows: int, experts: Experts) -> float:
        """Return the time of the products of experts, router included.

        The tokens that an expert gets are its product's rows; an expert that no token reaches is not read.
        """
        router = self.device.matmul(rows, self.shape.hidden, experts.count, self.element_bytes)
        reached = experts.reached(rows)
        each = rows * experts.per_token / reached
        routed = self._mlp(each, experts.of_one(self.tp), num_products=reached)
        return router + routed + self._mlp(rows, experts.of_shared(self.tp))

    @property
    def _keys(self) -> float:
        """Key features on this rank: a head at least, which ranks share when there are more of them than heads."""
        return max(1.0, self.shape.num_kv_heads / self.tp) * self.shape.head_dim

    def _pairs(self, pairs: float) -> float:
        """Flops of attention for pairs of a token and one that it attends to."""
        return 4 * pairs * self.shape.queries / self.tp

    def _elementwise(self, tokens: float) -> float:
        """Time of norms, residuals, rotation and activation, each a kernel of its own.

        Elements read and written per token: two norms (RMSNorm written out in fp32: 7 passes, LayerNorm: 2), two sums
        (3 passes each), rotation (6 passes over queries and keys), a gated MLP's activation and product (5, else 2).
        For each expert of a token a hidden state is sorted (2), and the result weighted, put back (2 each), summed (1).
        """
        shape, experts = self.shape, self.shape.experts
        hidden = (2 * (7 if shape.rms_norm else 2) + 6) * shape.hidden
        heads = 6 * (shape.queries / self.tp + self._keys)
        passes = 5 if shape.gated else 2
        mlp = passes * shape.intermediate / self.tp
        if experts is not None:
            routed = experts.per_token * (passes * experts.of_one(self.tp) + 7 * shape.hidden)
            mlp = experts.per_block(shape.num_layers, routed + passes * experts.of_shared(self.tp), mlp)
        return self.device.stream(tokens * (hidden + heads + mlp) * self.element_bytes)
