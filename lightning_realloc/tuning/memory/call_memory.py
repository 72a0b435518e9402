"""Peak bytes that one call adds on a rank, as the largest of the sums at a few moments.

The moments follow from the allocations of FSDP2, autograd and the generation engine (torch 2.13). Masks, positions,
samples and norms are left out, since they are smaller by orders of magnitude.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.dataflow.pipeline_schedule import passes_held, passes_waiting
from lightning_realloc.layout.dims import Layout
from lightning_realloc.limits import (
    CHUNK_ELEMENTS,
    GATHERED_SUM_BYTES,
    MAX_MOVING_BYTES,
    MAX_PREFILL_TOKENS,
    TILE_ELEMENTS,
    is_tiled,
)
from lightning_realloc.tuning.memory.call_shape import CallShape
from lightning_realloc.tuning.memory.generation_memory import (
    Cache,
    distillation_memory,
    draft_bytes,
    num_cache_slots,
    packed_bytes,
)
from lightning_realloc.tuning.memory.parts import DraftMemory, MemoryParts, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_elements import RankElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory
from lightning_realloc.tuning.shapes.tower import TowerBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """Memory model of one call on one rank."""

    role: RoleMemory
    """The role whose replicas the call uses."""
    kind: CallKind
    plan: CallPlan
    settings: MemorySettings
    workload: Workload | None
    sizes: RankElements
    """Element counts of the role in the call's layout."""
    is_home: bool
    """Whether the call runs on the role's home, and not on a replica next to it."""
    is_trained: bool
    """Whether the dataflow trains the role."""
    reads_base: bool = False
    """Whether the call reads the role's weights without their adapters."""
    partners_cache: int = 0
    """Bytes of keys and values of models that answer environments, each for as many samples at a time."""
    is_wrapped: bool = field(init=False)
    """Whether FSDP2 wraps the model."""
    weight_bytes: int = field(init=False)
    """Bytes of a weight during computation: of the replica, or of FSDP2's gathered weights."""
    activation_bytes: int = field(init=False)
    """Bytes of an activation."""
    _shape: CallShape | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        layout, settings, weight = self.plan.layout, self.settings, self._stored_bytes
        is_wrapped = layout.is_sharded or (layout.has_replicas and self.is_home and self.is_trained)
        if is_wrapped:
            weight = min(weight, settings.gathered_bytes)
        object.__setattr__(self, "is_wrapped", is_wrapped)
        object.__setattr__(self, "weight_bytes", weight)
        object.__setattr__(self, "activation_bytes", min(weight, settings.copy_bytes))
        load = self.workload
        shape = None if load is None else CallShape.from_plan(self.kind, self.plan, load, load.longest)
        object.__setattr__(self, "_shape", shape)

    @property
    def peak(self) -> MemoryParts:
        """Bytes at the moment with the largest total."""
        moments = {"train": self._train, "infer": self._infer, "generate": self._generate}[self.kind]()
        most = max(moments, key=lambda parts: parts.total)
        return most if self.kind != "generate" else most + self._merged + MemoryParts(kv_cache=self.partners_cache)

    @property
    def kept(self) -> MemoryParts:
        """Bytes of a generating call that stay where caches are not freed; a draft model frees its own."""
        own = 0 if self.cache is None else self.cache.distilling_bytes
        return MemoryParts(kv_cache=own + self.partners_cache) + self._merged

    @property
    def draft_bytes(self) -> int:
        """Bytes of the draft model of a generating call between generations, in the dtype of the weights."""
        if self.kind != "generate":
            return 0
        return draft_bytes(self._draft, element_bytes=self._stored_bytes)

    @property
    def _merged(self) -> MemoryParts:
        """Bytes of weights with merged adapters, which generation reads; FSDP merges none."""
        merges = self.kind == "generate" and not self.reads_base and self.sizes.dims.fsdp == 1
        return MemoryParts(copies=self.sizes.num_adapted * self.settings.copy_bytes if merges else 0)

    @property
    def _stored_bytes(self) -> int:
        """Bytes of a weight of the replica that the call reads."""
        settings = self.settings
        return settings.home_bytes(self.role, is_trained=self.is_trained) if self.is_home else settings.copy_bytes

    # ---- weights that FSDP gathers
    @property
    def _root(self) -> int:
        """Bytes of gathered weights outside of blocks, which stay gathered during a whole call."""
        return self.sizes.root * self.weight_bytes if self.is_wrapped else 0

    @property
    def _block(self) -> int:
        return self.sizes.largest_block * self.weight_bytes if self.is_wrapped else 0

    def _buffer(self, gathered: int) -> int:
        """Return the bytes of a gather's message buffer, which lives until the next gather has arrived."""
        return gathered if self.sizes.dims.num_shards > 1 else 0

    # ---- activations
    @property
    def _tp(self) -> int:
        return self.sizes.dims.tp

    def _hidden(self, tokens: int) -> int:
        return 0 if self.role.shape is None else tokens * self.role.shape.hidden * self.activation_bytes

    def _working(self, tokens: int) -> int:
        shape = self.role.shape
        if shape is None:
            return 0
        working = tokens * shape.working_elements(self._tp, self.sizes.dims.ep) * self.activation_bytes
        return working + self._read_keys(tokens) + self._sums

    def _exchanged(self, tokens: int) -> int:
        """Return the bytes of all-reduces that CPU ranks do by gathering; the previous message is still held."""
        part = self._hidden(tokens)
        gathers = self._tp > 1 and self.settings.builds_on_device and part <= GATHERED_SUM_BYTES
        return 2 * self._tp * part if gathers else 0

    def _backward(self, tokens: int) -> int:
        shape, keys = self.role.shape, self._read_keys(tokens)
        return 0 if shape is None else tokens * shape.backward_elements(self._tp) * self.activation_bytes + keys

    def _saved(self, tokens: int) -> int:
        """Return the bytes that one block keeps for its backward pass."""
        shape, others = self.role.shape, self._read_keys(tokens) + self._sums
        return 0 if shape is None else tokens * shape.saved_bytes(self._tp, self.activation_bytes) + others

    @property
    def _sums(self) -> int:
        """Return the bytes of a block's experts with their adapters added, as a mean over the rank's blocks.

        A pass computes them anew, and a backward pass needs them; generation merges them once unless FSDP wraps it.
        """
        if self.reads_base or (self.kind == "generate" and not self.is_wrapped):
            return 0
        return self.sizes.num_adapted_experts * self.weight_bytes // max(1, self.sizes.num_blocks)

    def _read_keys(self, tokens: int) -> int:
        """Return the bytes of other tokens' keys and values that a block reads where ranks divide queries of rows.

        Ranks that divide heads hold as many keys of others as they gave away. In a zigzag, tokens before a rank's first
        run are read twice: half a share more.
        """
        shape, dims = self.role.shape, self.plan.layout.dims
        if shape is None or self.kind == "generate" or (rows := shape.row_shares(dims)) == 1:
            return 0
        return tokens * (2 * rows - 1) * shape.keys(dims.tp) * self.activation_bytes

    @property
    def _columns(self) -> int:
        """Logits per token that a rank computes."""
        if self.role.shape is None:
            return 0
        return math.ceil(self.role.shape.num_outputs / (self._tp if self.role.divides_logits else 1))

    def _logits(self, rows: int, *, trained_width: int = 0) -> int:
        """Return the bytes of the logits for logprobs, or of a tile of them; under tp, of the rank's own part."""
        if is_tiled(rows, self._columns, trained_width):
            rows = max(1, TILE_ELEMENTS // self._columns)
        return rows * self._columns * self.activation_bytes

    def _tile_sums(self, rows: int) -> int:
        """Return the bytes of gradients if logits are computed in tiles: by hidden states, and by the head's weight.

        The latter is a tile's, and their sum in fp32.
        """
        shape, width = self.role.shape, self._trained_width
        if shape is None or not is_tiled(rows, self._columns, width):
            return 0
        return self.activation_bytes * rows * shape.hidden + (4 + self.activation_bytes) * self._columns * width

    @property
    def _trained_width(self) -> int:
        """Width of hidden states if the head is trained, else 0."""
        return 0 if self.role.shape is None or not self.sizes.trained_root else self.role.shape.hidden

    def _joined_logits(self, rows: int) -> int:
        """Return the bytes of the logits to draw from; under tp all logits, their message and the rank's own part."""
        shape = self.role.shape
        own = rows * self._columns * self.activation_bytes
        if shape is None or self._tp == 1 or not self.role.divides_logits:
            return own
        return 2 * rows * shape.num_outputs * self.activation_bytes + own

    def _chunk(self, rows: int) -> int:
        """Return the bytes of the logits that are held in fp32 at a time."""
        return 4 * min(rows * self._columns, CHUNK_ELEMENTS) if self._columns > 1 else 0

    @property
    def _has_head(self) -> bool:
        """Whether the rank computes logits, as those of the last pipeline stage do."""
        return self.sizes.stage == self.sizes.dims.pp - 1

    @property
    def _draft(self) -> DraftMemory | None:
        """Draft model of the rank, which of a pipeline's stages the last one has."""
        return self.settings.engine.draft if self._has_head else None

    def _micro_batches(self) -> tuple[int, int, int]:
        """Return the number of micro-batches, the rank's tokens of the largest, and those with logits."""
        shape, load = self._shape, self.workload
        if shape is None or load is None:
            return 1, 0, 0
        largest, cp = shape.micro_batch, self.plan.layout.count(*Layout.token_axes)
        scored = math.ceil(largest * load.response_tokens / cp) if self._has_head else 0
        return shape.num_micro_batches, math.ceil(largest * load.longest / cp), scored

    def _images(self, prompts: int | None = None) -> TowerBytes:
        """Return the bytes of images of some prompts, or of a micro-batch; pixels of all are on all pipeline stages."""
        tower, load, division = self.role.tower, self.workload, self._shape
        if tower is None or load is None or load.images is None or division is None:
            return TowerBytes()
        trained = self.role.trained_vision if self.kind == "train" else None
        count, recomputes = prompts or division.micro_batch, self.plan.gradient_checkpointing
        read = tower.pass_bytes(load.images, count, self.activation_bytes, trained=trained, recomputes=recomputes)
        pixels = read.pixels * (division.num_micro_batches if self.sizes.dims.pp > 1 else 1)
        return TowerBytes(pixels=pixels) if self.sizes.stage > 0 else read._replace(pixels=pixels)

    # ---- calls
    def _infer(self) -> list[MemoryParts]:
        (_, tokens, rows), images = self._micro_batches(), self._images()
        return [
            *self._gathering(tokens),
            MemoryParts(gathered=self._root + self._buffer(self._root), activations=images.reading),
            MemoryParts(
                gathered=self._root + self._block + self._buffer(self._block),
                activations=self._working(tokens) + self._exchanged(tokens) + images.features + images.pixels,
            ),
            MemoryParts(
                gathered=self._root + self._buffer(self._block),
                activations=2 * self._hidden(tokens) + images.pixels,
                logits=self._logits(rows) + self._chunk(rows),
            ),
        ]

    def _gathering(self, tokens: int, *, gradients: int = 0, kv_cache: int = 0) -> list[MemoryParts]:
        """Return the moments when a block's weights arrive; a message lives until the next one has been unpacked."""
        if not self.is_wrapped:
            return []  # nothing is gathered, and every other moment holds more
        block, kept = self._buffer(self._block), {"gradients": gradients, "kv_cache": kv_cache}
        return [
            MemoryParts(gathered=self._root + self._buffer(self._root) + block, **kept),
            MemoryParts(gathered=self._root + self._block + 2 * block, activations=2 * self._hidden(tokens), **kept),
        ]

    def _generate(self) -> list[MemoryParts]:
        body = MemoryParts(gathered=self._root + self._block + self._buffer(self._block))
        shape, load, cache, division = self.role.shape, self.workload, self.cache, self._shape
        if shape is None or load is None or cache is None or division is None:
            return [*self._gathering(0), body]
        engine, share, slots, last = self.settings.engine, division.share, division.slots, cache.final_bytes
        prompts = math.ceil(division.num_prompts(slots) / self.sizes.dims.pp)  # of one group, as stages run in turn
        unread = prompts * (load.prompt_tokens - 1) if cache.positions is None else cache.positions
        prefill = min(MAX_PREFILL_TOKENS, unread) + slots
        # A step reads a prompt with images whole.
        images = self._images(max(1, min(prompts, MAX_PREFILL_TOKENS // load.prompt_tokens)))
        # Where samples wait for slots, prompts are still processed when the cache has grown.
        is_small = share == slots and engine.frees_cache
        read = MemoryParts(kv_cache=cache.prefill_bytes if is_small else last)
        growth = cache.growth_bytes if engine.frees_cache else 0
        verified = slots * (1 + engine.num_ahead)
        packed = MemoryParts(packed=self._packed(load.response_tokens))
        drawing = MemoryParts(  # logits, and their probabilities in fp32
            gathered=self._root + self._buffer(self._block),
            kv_cache=last,
            activations=self._hidden(verified),
            logits=self._joined_logits(verified) + verified * shape.num_outputs * 4 if self._has_head else 0,
        )
        moments = [
            *self._gathering(verified, kv_cache=last),
            read + MemoryParts(gathered=self._root + self._buffer(self._root), activations=images.reading),
            body + read + MemoryParts(activations=self._working(prefill) + images.features + images.pixels),
            body + MemoryParts(kv_cache=last + growth, activations=self._working(verified)),
            drawing,
            MemoryParts(kv_cache=cache.distilling_bytes)
            + distillation_memory(self._draft, samples=share, longest=cache.longest),
        ]
        return [moment + packed for moment in moments]

    @property
    def cache(self) -> Cache | None:
        """Keys and values of a generating call; None where its lengths or the model's shape are not known."""
        shape, load, engine, division = self.role.shape, self.workload, self.settings.engine, self._shape
        if shape is None or load is None or division is None:
            return None
        return Cache(
            target=shape,
            draft=None if self._draft is None else self._draft.model.shape,
            tp=self._tp,
            num_layers=len(self.role.model.stage_blocks(self.sizes.dims.pp)[self.sizes.stage]),
            element_bytes=self.activation_bytes,
            slots=num_cache_slots(engine, running=division.slots, share=division.share),
            prompt_tokens=load.prompt_tokens,
            longest=load.longest,
            max_bytes=engine.max_cache_bytes,
            num_groups=self.sizes.dims.pp,
            fills=engine.moves_samples and self.plan.layout.data_parallel_size > 1 and not self.is_wrapped,
        )

    def _packed(self, num_steps: int) -> int:
        if self.is_wrapped:
            return 0  # FSDP frees weights between two uses
        stage, tp = (self.sizes.stage, self.sizes.dims.pp), self._tp
        size, engine = self.activation_bytes, self.settings.engine
        return packed_bytes(self.role, engine, tp=tp, element_bytes=size, num_steps=num_steps, stage=stage)

    def _train(self) -> list[MemoryParts]:
        """Return the moments of a training call's last micro-batch, when the gradients of the others exist."""
        (count, tokens, rows), images = self._micro_batches(), self._images()
        (kept, others), own = self.held_on(self.sizes.stage), images.saved + images.backward
        master, sizes, arrived = self.settings.master_bytes, self.sizes, self._root + self._buffer(self._root)
        block, root = sizes.trained_block * self.weight_bytes, sizes.trained_root * self.weight_bytes
        shards = sizes.num_trained_sharded * master
        # FSDP accumulates unsharded gradients up to the last micro-batch, since one reduction costs less than many.
        earlier = sizes.num_trained * master if count > 1 else 0
        head = 2 * self._hidden(tokens) if self._has_head else 0
        recomputed = self._saved(tokens) if self.plan.gradient_checkpointing else 0
        backward = self._backward(tokens)
        moments = [
            *self._gathering(tokens, gradients=earlier),
            MemoryParts(gathered=arrived, gradients=earlier, activations=others + images.working),
            MemoryParts(  # backward pass of the loss: the logits, their gradient and two fp32 chunks
                gradients=earlier,
                activations=kept + head,
                logits=2 * self._logits(rows, trained_width=self._trained_width)
                + 2 * self._chunk(rows)
                + self._tile_sums(rows),
                gathered=self._root + self._buffer(self._block),
            ),
            MemoryParts(  # backward pass of the last block; the previous block is already gathered
                gradients=(earlier or root) + block,
                activations=kept + recomputed + backward,
                gathered=self._root + 2 * self._block,
            ),
        ]
        one = self._saved(tokens) + backward
        if self.is_wrapped:
            reduction = block + block // sizes.dims.num_shards  # the message and the reduced shard
            moments += [
                MemoryParts(  # the last block's gradients are reduced while the previous block computes
                    gradients=(earlier or root) + block + reduction,
                    activations=max(0, kept - one) + recomputed,
                    gathered=self._root + 2 * self._block,
                ),
                MemoryParts(gradients=shards + 2 * root, gathered=self._root, activations=own),
            ]
        else:
            # A whole gradient next to the one that it is added to; no weight of a tower is as large.
            text = max(0, sizes.trained_root - self.role.num_trained_vision)
            embedding = text * self.weight_bytes if earlier else 0
            after = max(one + images.saved, own)
            moments.append(MemoryParts(gradients=sizes.num_trained * master + embedding, activations=after))
        pixels = MemoryParts(activations=images.pixels)
        return [moment + pixels for moment in moments] if images.pixels else moments

    def held_on(self, stage: int) -> tuple[int, int]:
        """Return the bytes that a stage between the ends keeps for backward passes: of all, and of all but one.

        Under ZB-H1 gradients of weights wait for as many passes as there are stages before. In training the bytes of
        stages with equal elements differ by these two alone, and grow with them.
        """
        (count, tokens, _), dims, shape = self._micro_batches(), self.sizes.dims, self.role.shape
        in_flight = passes_held(stage, dims.pp, count, vpp=dims.vpp)
        kept = math.ceil(in_flight * (self._kept_activations(tokens) + self._images().saved))
        if self.plan.pipeline_schedule != "1f1b" and shape is not None:
            each = tokens * shape.product_elements(dims.tp) * self.activation_bytes
            kept += math.ceil(passes_waiting(stage, count, vpp=dims.vpp) * self.sizes.num_blocks * each)
        return kept, math.ceil(kept * (1 - 1 / max(1, in_flight)))

    def _kept_activations(self, tokens: int) -> int:
        """Return the bytes that a pass keeps on the device: of offloaded activations, those that move."""
        each = self._hidden(tokens) if self.plan.gradient_checkpointing else self._saved(tokens)
        kept = self.sizes.num_blocks * each
        return min(kept, each + MAX_MOVING_BYTES) if self.plan.activation_offload else kept
