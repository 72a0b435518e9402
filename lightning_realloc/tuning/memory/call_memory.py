"""How many bytes does one call add to what a rank keeps between calls? The largest of a few moments, each a sum.

Which moments those are follows from what FSDP2, autograd and the generation engine allocate and when they free it
(torch 2.13). What a moment leaves out is smaller by orders of magnitude: masks, positions, samples, norms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_realloc.dataflow.dataflow import CallKind
from lightning_realloc.dataflow.execution_plan import CallPlan
from lightning_realloc.limits import MAX_PREFILL_TOKENS
from lightning_realloc.tuning.memory.generation_memory import Cache, learning, packed_bytes
from lightning_realloc.tuning.memory.parts import MemoryParts, MemorySettings, Workload
from lightning_realloc.tuning.shapes.role_elements import RankElements
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

CHUNK_ELEMENTS = 1 << 23
"""Logits that are worked on in fp32 at a time; ``runtime.token_logprobs`` has the same number."""
GATHERED_SUM_BYTES = 256 << 10
"""Up to this size CPU ranks gather what they add up; ``runtime.tp_group`` has the same number."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """What one data-parallel rank runs in a call's forward passes."""

    count: int
    tokens: int
    """Of the largest one."""
    response_tokens: int
    """Of the largest one: those that logits are computed for."""

    @classmethod
    def of(cls, workload: Workload | None, num_sequences: int, limit: int | None) -> MicroBatches:
        """Pack a rank's equal sequences as ``runtime.packing`` does."""
        if workload is None:
            return cls(1, 0, 0)
        length = workload.prompt_tokens + workload.response_tokens
        each = max(1, (limit or workload.micro_batch_tokens) // length)
        largest = min(each, num_sequences)
        return cls(math.ceil(num_sequences / each), largest * length, largest * workload.response_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallMemory:
    """One call on one rank."""

    role: RoleMemory
    plan: CallPlan
    settings: MemorySettings
    workload: Workload | None
    sizes: RankElements
    """Of the role in the call's layout."""
    is_wrapped: bool
    """Whether FSDP2 wraps the model."""
    weight_bytes: int
    """Of one weight that is computed with: of the replica, or of what FSDP2 gathers."""
    activation_bytes: int
    """Of one activation."""

    @classmethod
    def of_replica(
        cls, role: RoleMemory, plan: CallPlan, settings: MemorySettings, workload: Workload | None,
        sizes: RankElements, *, is_home: bool, is_trained: bool,
    ) -> CallMemory:  # fmt: skip
        """Describe a call on a role's home replica, or on a copy of it in another layout."""
        dims = plan.layout.dims
        is_wrapped = dims.fsdp > 1 or (dims.dp > 1 and is_home and is_trained)
        weight = settings.home_bytes(role, is_trained=is_trained) if is_home else settings.copy_bytes
        if is_wrapped:
            weight = min(weight, settings.gathered_bytes)
        return cls(
            role=role, plan=plan, settings=settings, workload=workload, sizes=sizes, is_wrapped=is_wrapped,
            weight_bytes=weight, activation_bytes=min(weight, settings.copy_bytes),
        )  # fmt: skip

    def peak(self, kind: CallKind) -> MemoryParts:
        """Return the bytes of the moment that needs most."""
        moments = {"train": self._train, "infer": self._infer, "generate": self._generate}[kind]()
        return max(moments, key=lambda parts: parts.total)

    # ---- weights that FSDP gathers
    @property
    def _root(self) -> int:
        """Bytes of gathered weights outside of blocks, which stay gathered through a call."""
        return self.sizes.root * self.weight_bytes if self.is_wrapped else 0

    @property
    def _block(self) -> int:
        return self.sizes.largest_block * self.weight_bytes if self.is_wrapped else 0

    def _buffer(self, gathered: int) -> int:
        """Bytes of the message that weights arrive in, kept until the next ones have come."""
        return gathered if self.sizes.dims.fsdp > 1 else 0

    # ---- activations
    @property
    def _tp(self) -> int:
        return self.sizes.dims.tp

    def _hidden(self, tokens: int) -> int:
        return 0 if self.role.shape is None else tokens * self.role.shape.hidden * self.activation_bytes

    def _working(self, tokens: int) -> int:
        shape = self.role.shape
        return 0 if shape is None else tokens * shape.working_elements(self._tp) * self.activation_bytes

    def _exchanged(self, tokens: int) -> int:
        """Bytes of what tensor-parallel CPU ranks add up by gathering, twice: the last message is still held."""
        part = self._hidden(tokens)
        gathers = self._tp > 1 and self.settings.builds_on_device and part <= GATHERED_SUM_BYTES
        return 2 * self._tp * part if gathers else 0

    def _backward(self, tokens: int) -> int:
        shape = self.role.shape
        return 0 if shape is None else tokens * shape.backward_elements(self._tp) * self.activation_bytes

    def _saved(self, tokens: int) -> int:
        """Bytes that one block keeps for its backward pass."""
        shape = self.role.shape
        return 0 if shape is None else tokens * shape.saved_bytes(self._tp, self.activation_bytes)

    @property
    def _columns(self) -> int:
        """Logits per token that a rank makes."""
        if self.role.shape is None:
            return 0
        return math.ceil(self.role.shape.num_outputs / (self._tp if self.role.divides_logits else 1))

    def _logits(self, rows: int) -> int:
        """Bytes of the logits that log-probabilities are taken of: under tp the rank's own share."""
        return rows * self._columns * self.activation_bytes

    def _joined_logits(self, rows: int) -> int:
        """Bytes of logits to draw from: under tp all of them, the message they came in, and the rank's own share."""
        shape = self.role.shape
        if shape is None or self._tp == 1 or not self.role.divides_logits:
            return self._logits(rows)
        return 2 * rows * shape.num_outputs * self.activation_bytes + self._logits(rows)

    def _chunk(self, rows: int) -> int:
        """Bytes of the logits that are held in fp32 at a time."""
        return 4 * min(rows * self._columns, CHUNK_ELEMENTS) if self._columns > 1 else 0

    @property
    def _has_head(self) -> bool:
        """Whether the rank computes logits: on a pipeline's last stage."""
        return self.sizes.stage == self.sizes.dims.pp - 1

    @property
    def _shares(self) -> int:
        """Into how many the sequences are divided."""
        return self.sizes.dims.dp * self.sizes.dims.fsdp

    def _micro_batches(self, num_minibatches: int = 1) -> MicroBatches:
        shares = self._shares * num_minibatches
        share = 0 if self.workload is None else math.ceil(self.workload.num_sequences / shares)
        return MicroBatches.of(self.workload, share, self.plan.micro_batch_tokens)

    # ---- calls
    def _infer(self) -> list[MemoryParts]:
        micro = self._micro_batches()
        rows = micro.response_tokens if self._has_head else 0
        return [
            *self._gathering(micro.tokens),
            MemoryParts(
                gathered=self._root + self._block + self._buffer(self._block),
                activations=self._working(micro.tokens) + self._exchanged(micro.tokens),
            ),
            MemoryParts(
                gathered=self._root + self._buffer(self._block),
                activations=2 * self._hidden(micro.tokens),
                logits=self._logits(rows) + self._chunk(rows),
            ),
        ]

    def _gathering(self, tokens: int, *, gradients: int = 0, kv_cache: int = 0) -> list[MemoryParts]:
        """Return the moments when a block's weights arrive: a message is kept until the next one was taken apart."""
        if not self.is_wrapped:
            return []  # weights are there, and every other moment holds more beside them
        block, beside = self._buffer(self._block), {"gradients": gradients, "kv_cache": kv_cache}
        return [
            MemoryParts(gathered=self._root + self._buffer(self._root) + block, **beside),
            MemoryParts(gathered=self._root + self._block + 2 * block, activations=2 * self._hidden(tokens), **beside),
        ]

    def _generate(self) -> list[MemoryParts]:
        body = MemoryParts(gathered=self._root + self._block + self._buffer(self._block))
        shape, load, cache, engine = self.role.shape, self.workload, self.cache, self.settings.engine
        if shape is None or load is None or cache is None:
            return [*self._gathering(0), body]
        share, slots, last = self._generated, cache.slots, cache.at_last
        prompts = math.ceil(slots / load.samples_per_prompt) * (load.prompt_tokens - 1)
        prefill = min(MAX_PREFILL_TOKENS, prompts if cache.positions is None else cache.positions) + slots
        # Where samples wait for slots, prompts are still read when the cache has grown.
        read = MemoryParts(kv_cache=cache.at_first if share == slots else last, activations=self._working(prefill))
        verified = slots * (1 + engine.num_ahead)
        packed = MemoryParts(packed=self._packed(load.response_tokens))
        drawing = MemoryParts(  # logits, and their probabilities in fp32
            gathered=self._root + self._buffer(self._block),
            kv_cache=last,
            activations=self._hidden(verified),
            logits=self._joined_logits(verified) + verified * shape.num_outputs * 4,
        )
        moments = [
            *self._gathering(verified, kv_cache=last),
            body + read,
            body + MemoryParts(kv_cache=last + cache.growth, activations=self._working(verified)),
            drawing,
            MemoryParts(kv_cache=cache.while_learning) + learning(engine.draft, samples=share, longest=cache.longest),
        ]
        return [moment + packed for moment in moments]

    @property
    def _generated(self) -> int:
        """Sequences that a generating rank begins with."""
        return 0 if self.workload is None else math.ceil(self.workload.num_sequences / self._shares)

    @property
    def cache(self) -> Cache | None:
        """Keys and values of a generating call; None where its lengths or the model's shape are not known."""
        shape, load, engine = self.role.shape, self.workload, self.settings.engine
        if shape is None or load is None:
            return None
        return Cache(
            target=shape, draft=None if engine.draft is None else engine.draft.model.shape, tp=self._tp,
            element_bytes=self.activation_bytes, slots=min(self.plan.max_slots, self._generated),
            prompt_tokens=load.prompt_tokens, longest=load.prompt_tokens + load.response_tokens,
            most_bytes=engine.max_cache_bytes,
            fills=engine.moves_samples and self._shares > 1 and not self.is_wrapped,
        )  # fmt: skip

    def _packed(self, num_steps: int) -> int:
        if self.is_wrapped:
            return 0  # FSDP frees weights between two uses
        return packed_bytes(
            self.role, self.settings.engine, tp=self._tp, element_bytes=self.activation_bytes, num_steps=num_steps
        )

    def _train(self) -> list[MemoryParts]:
        """Return the moments of a training call's last micro-batch, when gradients of the others are there."""
        minibatches = 1 if self.workload is None else self.workload.num_minibatches
        micro = self._micro_batches(minibatches)
        pipelined = self.sizes.dims.pp - self.sizes.stage
        in_flight = min(micro.count, pipelined) if self.sizes.dims.pp > 1 else 1
        kept = in_flight * self._kept_activations(micro.tokens)
        master, sizes = self.settings.master_bytes, self.sizes
        block, root = sizes.trained_block * self.weight_bytes, sizes.trained_root * self.weight_bytes
        shards = sizes.num_trained_sharded * master
        # Until the last micro-batch FSDP adds up whole gradients: reducing them once costs less than every time.
        earlier = sizes.num_trained * master if micro.count > 1 else 0
        rows = micro.response_tokens if self._has_head else 0
        head = 2 * self._hidden(micro.tokens) if self._has_head else 0
        recomputed = self._saved(micro.tokens) if self.plan.gradient_checkpointing else 0
        backward = self._backward(micro.tokens)
        moments = [
            *self._gathering(micro.tokens, gradients=earlier),
            MemoryParts(  # the loss's backward pass: the logits, their gradient, and two chunks in fp32
                gradients=earlier, activations=kept + head, logits=2 * self._logits(rows) + 2 * self._chunk(rows),
                gathered=self._root + self._buffer(self._block),
            ),
            MemoryParts(  # the last block's: the block before it is gathered already
                gradients=(earlier or root) + block, activations=kept + recomputed + backward,
                gathered=self._root + 2 * self._block,
            ),
        ]  # fmt: skip
        one = self._saved(micro.tokens) + backward
        if self.is_wrapped:
            reduction = block + block // sizes.dims.fsdp  # the message and the reduced shard
            moments += [
                MemoryParts(  # the last block's gradients are sent while those of the one before are computed
                    gradients=(earlier or root) + block + reduction, activations=max(0, kept - one) + recomputed,
                    gathered=self._root + 2 * self._block,
                ),
                MemoryParts(gradients=shards + 2 * root, gathered=self._root),
            ]  # fmt: skip
        else:
            embedding = root if earlier else 0  # a whole gradient beside the one that it is added to
            moments.append(MemoryParts(gradients=sizes.num_trained * master + embedding, activations=one))
        return moments

    def _kept_activations(self, tokens: int) -> int:
        each = self._hidden(tokens) if self.plan.gradient_checkpointing else self._saved(tokens)
        return self.sizes.num_blocks * each
