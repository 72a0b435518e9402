"""Running the calls of a dataflow on this rank: who works on which samples, and what becomes of the results.

Every rank walks through the same calls in the same order and takes part in those whose layout includes it. Lengths and
ids are known everywhere, so every rank works out every share by itself and only results travel.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_realloc.errors import GenerationError, PlanError
from lightning_realloc.generation import GenerationEngine
from lightning_realloc.runtime.balance import balanced_shares
from lightning_realloc.runtime.exchange import all_gather_samples
from lightning_realloc.runtime.samples import Column, Samples
from lightning_realloc.runtime.training import MicroBatch, micro_batch_plan, pack_columns
from lightning_realloc.strategies.lockstep import Lockstep, PeerFailure
from lightning_realloc.strategies.model_pool import ModelPool, Replica
from lightning_realloc.strategies.trainer_step import Trainee
from lightning_realloc.tuning.dataflow import ModelFunctionCall

PhaseContext = Callable[[str], Any]


class CallRunner:
    """Runs calls of one algorithm.

    Args:
        module: The algorithm; its methods do the work.
        pool: Its models.
        phase: Context manager around every model's call: tells callbacks, yields the replica to work on.
        trainee: Steps the optimizers.
        device: Where tensors are worked on.
        rank: This process.
    """

    def __init__(
        self, module: Any, pool: ModelPool, phase: PhaseContext, trainee: Trainee, *, device: torch.device, rank: int
    ) -> None:
        self._module = module
        self._pool = pool
        self._phase = phase
        self._trainee = trainee
        self._device = device
        self._rank = rank
        self._engines: dict[int, tuple[GenerationEngine, Lockstep | None]] = {}
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.counts: defaultdict[str, int] = defaultdict(int)

    def run(self, batch: Samples, calls: Sequence[ModelFunctionCall]) -> Samples:
        """Return the batch with everything that the calls produced, the same on every rank."""
        samples = batch
        for call in calls:
            with self._timed(call.name):
                samples = self._KINDS[call.kind](self, call, samples)
        return samples

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[name] += time.perf_counter() - begin
        self.counts[name] += 1

    # ---- generate
    def _generate(self, call: ModelFunctionCall, prompts: Samples) -> Samples:
        lengths = prompts.ragged("prompt_ids").lengths.tolist()
        _refuse_long_prompts(prompts, self._pool.home(str(call.role)))
        with self._phase(call.name) as replica:
            share = self._share(replica, lengths)
            mine = None if share is None else self._generate_share(call, replica, prompts.select(share))
            made = all_gather_samples(self._contribution(replica, mine), device=self._device)
        return _with_known_objects(made, prompts)

    def _generate_share(
        self, call: ModelFunctionCall, replica: Replica, prompts: Samples
    ) -> Samples | Exception | None:
        """Return this rank's responses or what it failed with; None when it stopped because another rank failed."""
        try:
            engine, lockstep = self._engine(call, replica)
        except GenerationError as error:  # of a model that nobody can generate from: told to ranks outside its layout
            return error
        if lockstep is not None:
            lockstep.begin()
        try:
            with self._precise():
                made: Samples = getattr(self._module, call.method)(engine, prompts)
            return made
        except PeerFailure:
            return None
        except Exception as error:
            if lockstep is not None:
                lockstep.give_up()
            return error
        finally:
            # Training needs the memory more. And a cache that has grown rounds logprobs differently, in the last bit,
            # than the fresh one of a run that was resumed here.
            engine.release()

    def _engine(self, call: ModelFunctionCall, replica: Replica) -> tuple[GenerationEngine, Lockstep | None]:
        if id(replica.model) not in self._engines:
            group = self._pool.meshes.group(replica.layout, "dp", "fsdp") if replica.is_sharded else None
            lockstep = None if group is None else Lockstep(group, self._device)
            engine = GenerationEngine(
                replica.model,
                tokenizer=self._module.tokenizer,
                max_slots=self._pool.plan.call(call.name).max_slots,
                lockstep=lockstep,
            )
            self._engines[id(replica.model)] = engine, lockstep
        engine, lockstep = self._engines[id(replica.model)]
        engine.weights_updated()
        return engine, lockstep

    # ---- infer
    def _infer(self, call: ModelFunctionCall, samples: Samples) -> Samples:
        lengths = _sequence_lengths(samples)
        with self._phase(call.name) as replica:
            mine: Samples | Exception | None = None
            plans = micro_batch_plan(
                lengths, replica.layout.data_parallel_size, max_tokens=self._micro_batch_tokens(call),
                equal_counts=replica.is_sharded,
            )  # fmt: skip
            if self._rank in replica.layout:
                mine = self._infer_share(call, replica, samples, plans[replica.layout.data_parallel_index(self._rank)])
            made = all_gather_samples(self._contribution(replica, mine), device=self._device)
        return samples.with_columns(**made.by_ids(samples.ids).columns)

    def _infer_share(
        self, call: ModelFunctionCall, replica: Replica, samples: Samples, plan: Sequence[MicroBatch]
    ) -> Samples | Exception | None:
        """Return what this rank's micro-batches gave, or what it failed with; None when none of them counts."""
        method = getattr(self._module, call.method)
        replica.model.eval()  # the home replica may come from a training call with dropout
        try:
            with torch.no_grad(), self._precise():
                parts = [self._infer_one(method, replica, samples, micro, call.produces[0]) for micro in plan]
            counted = [part for part, micro in zip(parts, plan, strict=True) if micro.counts]
            return Samples.concatenate(counted) if counted else None
        except Exception as error:
            if replica.is_sharded:
                raise  # in the middle of a forward pass that others take part in: ending is all that frees them
            return error

    def _infer_one(
        self, method: Callable[..., Tensor], replica: Replica, samples: Samples, micro: MicroBatch, name: str
    ) -> Samples:
        chosen = samples.select(micro.positions)
        batch = pack_columns(chosen, self._device, share_prompts=self._module.share_prompts)
        values = method(replica.model, batch)
        if values.shape[0] == len(chosen) and values.shape[0] != batch.num_tokens:
            return Samples(chosen.ids, {name: values})
        return Samples(chosen.ids, {name: batch.responses(values)})

    # ---- compute
    def _compute(self, call: ModelFunctionCall, samples: Samples) -> Samples:
        world = dist.get_world_size() if dist.is_initialized() else 1
        groups = samples.tensor("prompt_id").tolist() if "prompt_id" in samples else samples.ids.tolist()
        share = balanced_shares([1] * len(samples), world, groups=groups)[self._rank]
        if call.whole_batch:
            share = tuple(range(len(samples))) if self._rank == 0 else ()
        chosen = samples.select(share)
        mine: Samples | Exception | None = None
        if share:
            try:
                columns: Mapping[str, Column] = getattr(self._module, call.method)(chosen)
                mine = Samples(chosen.ids, columns)
            except Exception as error:
                mine = error
        made = all_gather_samples(mine, device=self._device)
        return samples.with_columns(**made.by_ids(samples.ids).columns)

    # ---- train
    def _train(self, call: ModelFunctionCall, samples: Samples) -> Samples:
        lengths = _sequence_lengths(samples)
        with self._phase(call.name) as replica:
            method = getattr(self._module, call.method)
            self._trainee.train(method, replica, samples, lengths, max_tokens=self._micro_batch_tokens(call))
        return samples

    _KINDS: ClassVar = {"generate": _generate, "infer": _infer, "compute": _compute, "train": _train}

    # ---- helpers
    def _share(self, replica: Replica, lengths: Sequence[int]) -> tuple[int, ...] | None:
        """Return the positions that this rank works on; None when it does not take part."""
        if self._rank not in replica.layout:
            return None
        shares = balanced_shares(lengths, replica.layout.data_parallel_size)
        return shares[replica.layout.data_parallel_index(self._rank)]

    def _contribution(self, replica: Replica, mine: Samples | Exception | None) -> Samples | Exception | None:
        """Return what this rank hands on: one rank of every tensor-parallel group speaks for all, errors always go."""
        if isinstance(mine, Exception) or mine is None:
            return mine
        return mine if replica.layout.coordinate(self._rank).tp == 0 else None

    def _micro_batch_tokens(self, call: ModelFunctionCall) -> int:
        planned = self._pool.plan.call(call.name).micro_batch_tokens
        return planned or self._module.train_options_of(str(call.role)).micro_batch_tokens

    def _precise(self) -> Any:
        """Copies already hold the dtype they are read in: autocast would only cast again."""
        return torch.autocast(self._device.type, enabled=False) if torch.is_autocast_enabled() else nullcontext()


def _sequence_lengths(samples: Samples) -> list[int]:
    lengths = samples.ragged("prompt_ids").lengths + samples.ragged("response_ids").lengths
    return [int(length) for length in lengths.tolist()]


def _refuse_long_prompts(prompts: Samples, replica: Replica) -> None:
    """Name a prompt that leaves no room for a response; an engine knows only its place in one rank's share."""
    config: Any = getattr(replica.model, "config", None)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) if config is not None else None
    lengths = prompts.ragged("prompt_ids").lengths
    if context is None or not len(prompts) or int(lengths.max()) < context:
        return
    row = int(lengths.argmax())
    text = f": {str(prompts.objects('prompt')[row])[:80]!r}" if "prompt" in prompts else ""
    raise GenerationError(
        f"the prompt of sample {int(prompts.ids[row])} has {int(lengths[row])} tokens, and {replica.role}'s context of "
        f"{context} leaves no room for a response; shorten it to at most {context - 1} tokens or leave it out{text}"
    )


def _with_known_objects(made: Samples, prompts: Samples) -> Samples:
    """Give every response its prompt's python objects, which every rank has and nobody sent."""
    if "prompt_id" not in made:
        raise PlanError("a generate call must return the column 'prompt_id', the id of each response's prompt")
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompts.ids.tolist())}
    rows = [row_of[prompt_id] for prompt_id in made.tensor("prompt_id").tolist()]
    known = {
        name: tuple(column[row] for row in rows)
        for name, column in prompts.columns.items()
        if isinstance(column, tuple)
    }
    return made.with_columns(**known)
