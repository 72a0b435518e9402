"""Roofline estimate of one rank's compute time for a decoder block, and for the head, from the model's shape.

Likewise for the tower of a model that reads images. ``cost`` adds communication and combines blocks into calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_realloc.limits import is_tiled
from lightning_realloc.tuning.estimate.hardware import Device
from lightning_realloc.tuning.shapes.experts import Experts
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt
from lightning_realloc.tuning.shapes.model_shape import ModelShape
from lightning_realloc.tuning.shapes.tower import Tower, VisionPart

BACKWARD_ATTENTION = 2.5
"""Ratio of backward to forward flops of fused attention: five products for two, since it recomputes the scores."""
BACKWARD_TRAFFIC = 2.0
"""Ratio of backward to forward memory traffic of elementwise kernels: a gradient for each tensor that is read."""
LOGIT_PASSES = 4
"""Reads and writes of the fp32 logits to compute logprobs, or to draw a token."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Compute times of the first of ``tp`` ranks, in seconds: no rank has more heads, and all have equal experts."""

    shape: ModelShape
    tp: int
    device: Device
    element_bytes: int
    """Bytes of a weight, and of an activation, during computation."""
    ep: int = 1
    """Ranks that divide the experts, and send each other tokens."""
    _products: dict[int, float] = field(default_factory=dict, repr=False, compare=False)

    def forward(self, tokens: float, context: float) -> float:
        """Return the time of a block's forward pass on tokens that attend to ``context`` tokens on average."""
        return (
            self.products(tokens)
            + self.device.attention(self._attention_flops(tokens, context))
            + self._elementwise(tokens)
        )

    def backward(self, tokens: float, context: float, *, trained_share: float) -> float:
        """Return the time of a block's backward pass: gradients of activations, and of the trained share of weights."""
        return (
            (1 + trained_share) * self.products(tokens)
            + BACKWARD_ATTENTION * self.device.attention(self._attention_flops(tokens, context))
            + BACKWARD_TRAFFIC * self._elementwise(tokens)
        )

    def decode(self, sequences: float, context: float) -> float:
        """Return a block's time for one new token of each sequence, each with ``context`` keys and values to read.

        The engine reads those beyond a sliding window as well, and masks them. Every head computes with the same
        latents, so their arithmetic may take longer than reading them. The absorbed projection is one of the products.
        """
        elements = self.shape.kv_cache_elements(self.tp) / self.shape.num_layers
        attention = self.device.read_cache(sequences * context * elements * self.element_bytes)
        latent = self.shape.cached_latent
        if latent is not None:
            heads = self.shape.queries(self.tp) // self.shape.head_dim
            flops = 4 * sequences * context * heads * latent.cached_width
            attention = max(attention, self.device.attention(flops))
        return self.products(sequences) + attention + self._elementwise(sequences)

    def head(self, rows: float) -> float:
        """Return the time to compute logits or scores for ``rows`` tokens."""
        outputs = self.shape.num_outputs / (self.tp if self.shape.num_outputs > 1 else 1)
        return self.device.matmul(rows, self.shape.hidden, outputs, self.element_bytes)

    def tiled_head(self, rows: float, *, is_trained: bool) -> float:
        """Return the time to compute logits once more in a backward pass, as those are that are computed in tiles."""
        width, outputs = self.shape.hidden if is_trained else 0, self.shape.num_outputs / self.tp
        return self.head(rows) if self.shape.num_outputs > 1 and is_tiled(rows, outputs, width) else 0.0

    def logprobs(self, rows: float) -> float:
        """Return the time to compute logprobs from logits, which are divided between the ranks."""
        return self.sampling(rows) / self.tp

    def sampling(self, rows: float) -> float:
        """Return the time to draw tokens from logits, of which every rank has all."""
        if self.shape.num_outputs == 1:
            return 0.0
        return self.device.stream(4 * LOGIT_PASSES * rows * self.shape.num_outputs)

    def products(self, rows: float) -> float:
        """Return the time of a block's matrix products, with ``rows`` rounded to a whole number."""
        num_rows = max(1, round(rows))
        if num_rows not in self._products:
            self._products[num_rows] = self._matmuls(num_rows)
        return self._products[num_rows]

    def projections(self, rows: float) -> float:
        """Return the time of the products of attention's linear layers."""
        sizes = self.shape.projections(self.tp)
        return sum(self.device.matmul(rows, inner, columns, self.element_bytes) for inner, columns in sizes)

    def _matmuls(self, rows: int) -> float:
        shape, attention = self.shape, self.projections(rows)
        dense = self._mlp(rows, shape.intermediate / self.tp)
        if shape.experts is None:
            return attention + dense
        return attention + shape.experts.mean_over_blocks(shape.num_layers, self._mixture(rows, shape.experts), dense)

    def _mlp(self, rows: float, features: float, *, num_products: float = 1.0) -> float:
        """Return the time of the matrix products of ``num_products`` equal MLPs."""
        if features == 0:
            return 0.0
        up, down = (
            self.device.matmul(rows, inner, columns, self.element_bytes, num_products=num_products)
            for inner, columns in ((self.shape.hidden, features), (features, self.shape.hidden))
        )
        return (2 if self.shape.gated else 1) * up + down

    def _mixture(self, rows: int, experts: Experts) -> float:
        """Return the time of the matrix products of experts and of their router.

        The rows of an expert's product are the tokens that all ``ep`` ranks route to it; others are not read.
        """
        router = self.device.matmul(rows, self.shape.hidden, experts.count, self.element_bytes)
        reached = experts.num_reached(rows * self.ep) / self.ep
        each = rows * experts.per_token / reached
        routed = self._mlp(each, experts.features_on(self.tp), num_products=reached)
        return router + routed + self._mlp(rows, experts.shared_features_on(self.tp))

    def _attention_flops(self, tokens: float, context: float) -> float:
        """Return the attention flops of tokens that attend to ``context`` tokens, or to those of a sliding window."""
        return 4 * tokens * self.shape.mean_context(context) * self.shape.queries(self.tp)

    def _elementwise(self, tokens: float) -> float:
        """Return the time of norms, residuals, rotation and activation, each of which is a kernel of its own.

        Passes over the elements of a token: two norms (RMSNorm in several fp32 operations: 7, LayerNorm: 2), two
        residual sums (3 each), rotation of queries and keys (6), and a gated MLP's activation and product (5, not
        gated: 2). Each expert of a token sorts a hidden state (2), weights and puts back the result (2 each), and
        sums it (1).
        """
        shape, experts = self.shape, self.shape.experts
        hidden = (2 * (7 if shape.rms_norm else 2) + 6) * shape.hidden
        heads = 6 * (shape.queries(self.tp) + self.shape.keys(self.tp))
        passes = 5 if shape.gated else 2
        mlp = passes * shape.intermediate / self.tp
        if experts is not None:
            routed = experts.per_token * (passes * experts.features_on(self.tp) + 7 * shape.hidden)
            mlp = experts.mean_over_blocks(shape.num_layers, routed + passes * experts.shared_features_on(self.tp), mlp)
        return self.device.stream(tokens * (hidden + heads + mlp) * self.element_bytes)


@dataclass(frozen=True, slots=True)
class TowerKernels:
    """Compute times of a tower over the images of prompts, which every rank of the first pipeline stage runs whole."""

    tower: Tower
    images: ImagesPerPrompt
    """Images of one prompt."""
    blocks: Kernels
    """Times of the tower's blocks, whose tokens are patches."""
    trained: VisionPart
    """First part that has gradients if the role is trained."""
    trained_share: float
    """Fraction of the elements of tower and projector that have them."""

    def forward(self, num_prompts: float) -> float:
        """Return the time from pixels in host memory to the features of all tokens."""
        patches, device = num_prompts * self.images.num_patches, self.blocks.device
        block = self.blocks.forward(patches, self._context(patches))
        return (
            self.tower.pixel_bytes(patches) / device.cluster.host_bytes_per_s
            + self.tower.blocks.num_layers * max(block, device.efficiency.layer_launch_s)
            + self._projector(num_prompts)
        )

    def backward(self, num_prompts: float, *, recomputes: bool) -> float:
        """Return the time of a backward pass, which ends at the first part that is trained."""
        if self.trained is None:
            return 0.0
        if self.trained == "projector":
            return 2 * self._projector(num_prompts)
        patches = num_prompts * self.images.num_patches
        context = self._context(patches)
        block = self.blocks.backward(patches, context, trained_share=self.trained_share)
        again = self.blocks.forward(patches, context) if recomputes else 0.0
        launch = (2 if recomputes else 1) * self.blocks.device.efficiency.layer_launch_s
        projector = (1 + self.trained_share) * self._projector(num_prompts)
        return self.tower.blocks.num_layers * max(block + again, launch) + projector

    def _context(self, patches: float) -> float:
        return patches if self.tower.is_joint else self.tower.mean_context(self.images.part_patches)

    def _projector(self, num_prompts: float) -> float:
        rows, columns = num_prompts * self.images.tokens, self.tower.outputs
        return self.blocks.device.matmul(rows, self.tower.projector / columns, columns, self.blocks.element_bytes)
