"""Models to profile block by block, one per shape of an algorithm's roles, and the rank that profiles them."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_realloc.batch.packing import PackedBatch
from lightning_realloc.dataflow.dataflow import CallKind, Dataflow
from lightning_realloc.errors import ConfigError, PlanError
from lightning_realloc.generation import GenerationEngine, SamplingParams
from lightning_realloc.generation.core.model_config import text_config_of
from lightning_realloc.runtime.parallel.mesh import MeshRegistry
from lightning_realloc.runtime.parallel.packed_forward import packed_logits, sequence_scores, token_logprobs
from lightning_realloc.strategies.algorithm_protocol import ModelRole
from lightning_realloc.strategies.calls.lockstep import Lockstep
from lightning_realloc.strategies.pool.pool_options import PoolOptions, RunFacts
from lightning_realloc.tuning.estimate.pass_samples import Size
from lightning_realloc.tuning.memory.parts import Workload
from lightning_realloc.tuning.shapes.role_memory import RoleMemory

Forward = Callable[[nn.Module, PackedBatch], Tensor]
Decode = Callable[[nn.Module, dist.ProcessGroup | None, Size, int], Sequence[float]]
"""(model, group in lockstep, sequences and context, number of steps) -> seconds of each decoding step."""

_OUTSIDE_OF_BLOCKS = ("vocab_size", "num_labels", "id2label", "label2id", "architectures", "tie_word_embeddings")
"""Entries of a model's config that do not change its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This rank, its devices and precision."""

    options: PoolOptions
    """Dtypes, transport, and facts about the ranks."""
    meshes: MeshRegistry
    """Process groups by layout."""
    forward_context: Callable[[bool], AbstractContextManager[object]]
    """Whether FSDP wraps the model -> context of a training forward pass."""
    clock: Callable[[], float] = time.perf_counter
    """Current time in seconds."""

    @property
    def facts(self) -> RunFacts:
        """This rank among those of the run."""
        return self.options.facts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """A model whose passes are measured."""

    key: str
    """Name of its shape in the profile table."""
    num_blocks: int
    """Blocks of the real model."""
    num_outside: int
    """Elements of the real model's parameters outside of blocks."""
    build: Callable[[int], nn.Module]
    """Number of blocks -> a model with full weights on the device, the same on every rank."""
    forward: Forward
    """A call's forward pass over a pack: one number per token or per sequence."""
    is_trained: bool
    """Whether to measure training passes and optimizer steps."""
    new_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    """Parameters -> the role's optimizer."""
    decode: Decode | None = None
    """Measures decoding; None if the model does not generate."""
    tp_plan: Mapping[str, str] | None = None
    """Tensor-parallel styles by module pattern; None uses the model's own."""
    compile: str | None = None
    """Backend of ``torch.compile`` for its blocks in training calls; None does not compile."""
    bare: Subject | None = None
    """Model of the same blocks with a head of one score, to measure blocks with. None if this is one or none exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """Models of an algorithm to measure, and the sizes of their passes."""

    roles: Sequence[ModelRole]
    """All roles of the algorithm."""
    described: Mapping[str, RoleMemory]
    """Role -> its description."""
    dataflow: Dataflow
    """Calls that run."""
    workload: Workload
    """Sequences and tokens of an iteration."""
    mean_response: int
    """Mean tokens of a response: the length of measured micro-batches, and about that of decoding."""
    new_optimizer: Callable[[str, list[nn.Parameter]], torch.optim.Optimizer]
    """(role, parameters) -> the role's optimizer."""
    tp_plans: Mapping[str, Mapping[str, str]]
    """Role -> tensor-parallel styles, for models without a plan of their own."""
    compiled: Mapping[str, str]
    """Role -> backend of ``torch.compile`` for its blocks in training calls; only roles that are compiled."""
    seed: int
    """Seed of the measured models' random weights."""

    def shape_names(self) -> dict[str, str]:
        """Return role -> name of its shape; roles whose passes cost the same share a name.

        Raises:
            PlanError: for a role without a config.
        """
        texts = {}
        for role in self.roles:
            config = role.config()
            if config is None:
                raise PlanError(
                    f"role {role.name!r} is a module without a Hugging Face config and cannot be measured block by "
                    f"block; give it a model of transformers"
                )
            description = [role.task, config.to_dict(), *role.describe_adapters()]
            texts[role.name] = json.dumps(description, sort_keys=True, default=str)
        # Only training is compiled, so a frozen role can share the profile of a compiled trained role of its shape.
        by_text = {texts[name]: backend for name, backend in self.compiled.items() if name in texts}
        backends = {name: by_text.get(text, "") for name, text in texts.items()}
        backends |= {role.name: self.compiled.get(role.name, "") for role in self.roles if role.trained}
        return {name: hashlib.sha256((text + backends[name]).encode()).hexdigest()[:16] for name, text in texts.items()}


@dataclass(frozen=True, slots=True)
class SubjectMaker:
    """Makes the subjects of a request."""

    request: ProfileRequest
    """The models."""
    machine: Machine
    """This rank."""
    names: Mapping[str, str]
    """Role -> name of its shape."""

    def make(self) -> list[Subject]:
        """Return one subject per shape. The one with the most kinds of calls comes first among equal blocks.

        The first subject with given blocks measures the additions of shards for all of them.
        """
        chosen: dict[str, ModelRole] = {}
        called = {call.role for call in self.request.dataflow.model_calls}
        for role in self.request.roles:  # a trained role represents frozen ones of its shape
            if role.name in called and (self.names[role.name] not in chosen or role.trained):
                chosen[self.names[role.name]] = role
        bare: dict[str, Subject | None] = {}
        subjects: list[Subject] = []
        for key, role in sorted(chosen.items(), key=lambda item: (not item[1].trained, not self._generates(item[0]))):
            blocks = _block_key(role) + self.request.compiled.get(role.name, "")
            if blocks not in bare:
                bare[blocks] = self._bare_subject(role, blocks)
            decode = _make_decode(self.machine) if self._generates(key) else None
            subjects.append(self._subject(role, key, decode=decode, bare=bare[blocks]))
        return subjects

    def kinds(self, key: str) -> set[CallKind]:
        """Return the kinds of calls that models of a shape run."""
        return {call.kind for call in self.request.dataflow.model_calls if self.names[str(call.role)] == key}

    def _generates(self, key: str) -> bool:
        return "generate" in self.kinds(key)

    def _bare_subject(self, role: ModelRole, key: str) -> Subject | None:
        """Return a role's blocks with a head of one score; None if transformers has no such model of its family."""
        scorer = replace(role, task="token_classification")
        try:
            scorer.describe()
        except ConfigError:
            return None
        return self._subject(scorer, key)

    def _subject(
        self, role: ModelRole, key: str, *, decode: Decode | None = None, bare: Subject | None = None
    ) -> Subject:
        request, name, model = self.request, role.name, self.request.described[role.name].model
        return Subject(
            key=key,
            num_blocks=model.num_blocks,
            num_outside=sum(param.numel for param in model.params if param.section != "block"),
            build=lambda depth: _build(role, depth, self.machine.facts.device, request.seed),
            forward=_FORWARDS[role.task],
            is_trained=role.trained,
            new_optimizer=lambda parameters: request.new_optimizer(name, parameters),
            decode=decode,
            tp_plan=request.tp_plans.get(name),
            compile=request.compiled.get(name),
            bare=bare,
        )


def _block_key(role: ModelRole) -> str:
    """Return a name that models with equal blocks share, whatever their embeddings and heads."""
    config = role.config()
    assert config is not None, "shape_names refuses roles without config"
    content = {name: value for name, value in config.to_dict().items() if name not in _OUTSIDE_OF_BLOCKS}
    return json.dumps(content, sort_keys=True, default=str)


def _build(role: ModelRole, depth: int, device: torch.device, seed: int) -> nn.Module:
    """Return a model of the role's kind with ``depth`` blocks and random weights."""
    config = copy.deepcopy(role.config())
    assert config is not None, "shape_names refuses roles without config"
    text: Any = config.get_text_config()
    count = text.num_hidden_layers
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) == count:  # one entry per block, as layer_types
            setattr(text, name, (value * depth)[:depth])
    text.num_hidden_layers = depth
    vars(config).pop("quantization_config", None)  # random weights cannot be quantized
    with device:
        return role.resembling(config).build(seed=seed)


def _scores_of_tokens(model: nn.Module, pack: PackedBatch) -> Tensor:
    return packed_logits(model, pack)[pack.predecessors, 0]


def _logprobs(model: nn.Module, pack: PackedBatch) -> Tensor:
    return token_logprobs(model, pack, with_entropy=torch.is_grad_enabled(), only_responses=True).logprobs


_FORWARDS: Mapping[str, Forward] = {
    "causal_lm": _logprobs,
    "token_classification": _scores_of_tokens,
    "sequence_classification": sequence_scores,
}


def _make_decode(machine: Machine) -> Decode:
    def decode(model: nn.Module, group: dist.ProcessGroup | None, size: Size, num_steps: int) -> list[float]:
        ends: list[float] = []

        def record_end() -> bool:
            if machine.facts.device.type == "cuda":
                torch.cuda.synchronize(machine.facts.device)
            ends.append(machine.clock())
            return False  # the generation continues

        lockstep = None if group is None else Lockstep(group, machine.facts.device)
        engine = GenerationEngine(model, max_slots=size.sequences, lockstep=lockstep)
        params = SamplingParams(max_new_tokens=num_steps + 2, ignore_eos=True, n=size.sequences)
        room = getattr(text_config_of(model), "max_position_embeddings", math.inf) - params.max_new_tokens
        prompt = [3] * int(max(1, min(size.prompt, room)))
        # A spent budget asks after every step. A lockstep of one rank would do so too, but its steps are not captured.
        engine.generate([prompt], params, token_budget=1, may_stop=record_end)
        steps = [end - begin for begin, end in itertools.pairwise(ends)]
        return steps[1:]  # the first one warms up decoding; the prefill came before it

    return decode
