"""Validated request of a command line of ``lightning-realloc plan``, with its default models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_realloc.algorithms import PolicyGradient
from lightning_realloc.algorithms.base.adapters import AdapterSource
from lightning_realloc.algorithms.rollout.conversations.partner_roles import has_own_model
from lightning_realloc.algorithms.rollout.reward_sources import is_further
from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.dataflow.execution_plan import ExecutionPlan
from lightning_realloc.dataflow.repeated_keys import refuse_repeated_keys
from lightning_realloc.errors import PlanError
from lightning_realloc.layout.cluster import ClusterSpec
from lightning_realloc.limits import DEFAULT_MICRO_BATCH_TOKENS
from lightning_realloc.remote_path import expand_home
from lightning_realloc.report.plan_flags import (
    ALGORITHMS,
    DEFAULT_SEARCH_SECONDS,
    OWN_PLAN,
    ROLES,
    parse_flags,
    plan_parser,
    refuse_contradictions,
)
from lightning_realloc.report.plan_images import PlannedImages
from lightning_realloc.report.run_file import RunFile, planned_run, read_content
from lightning_realloc.strategies.pool.memory_check import refuse_offload_without_gpu
from lightning_realloc.tuning.memory.parts import HEADROOM, Workload, parse_bytes
from lightning_realloc.tuning.shapes.images import ImagesPerPrompt

_LORA_OPTIONS = frozenset({"peft_type", "r", "target_modules", "lora_alpha"})
"""Options that distinguish a LoRA configuration from a mapping of roles."""
_SUGGESTED_PEFT = "{r: 16, target_modules: all-linear}"
_PEFT_EXAMPLE = f"as in --peft '{_SUGGESTED_PEFT}', or --peft '{{critic: {{r: 8}}}}' for single roles"
NO_MODEL = "none"
"""Model name that leaves a role out."""
MAX_DEVICES = 4096
"""Maximum size of a cluster in devices: pricing 1,024 takes a minute and half a gigabyte of host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Validated request of a command line."""

    flags: Any
    """Parsed flags."""
    sources: Mapping[str, str]
    """Role -> its model, as given by the user."""
    adapters: Mapping[str, AdapterSource]
    """Trained role -> adapters that are trained instead of its model."""
    shares: Mapping[str, str]
    """Role -> role whose model it shares, without that role's adapters."""
    dataflow: Dataflow
    """Calls of the algorithm."""
    cluster: ClusterSpec | None
    """Cluster; None only for a check without a memory budget."""
    memory_budget: int | None
    """Memory of a device, in bytes; None without a cluster and without ``--memory-per-device``."""
    headroom: float
    """Fraction of it that stays free; 0 for plans given by the user."""
    workload: Workload
    """Sequences, lengths and micro-batches of an iteration."""
    sweep: tuple[int, ...]
    """Numbers of nodes to search; empty without ``--sweep``."""
    images: PlannedImages
    """Images of prompts."""
    run: RunFile | None = None
    """Run of ``--config``; None without one."""
    counts_images: bool = False
    """Whether the length of prompts includes their images, as that of a run's data module does."""
    notes: tuple[str, ...] = ()
    """Assumptions about this run."""

    @property
    def is_cpu(self) -> bool:
        """Whether the cluster consists of CPUs, whose rates are nominal."""
        return _is_cpu(self.flags)

    @property
    def num_devices(self) -> int | None:
        """Number of devices of the cluster, or else of the run; None if neither is known."""
        if self.cluster is not None:
            return self.cluster.num_devices
        return None if self.run is None or self.run.devices is None else math.prod(self.run.devices)

    @property
    def seconds(self) -> float:
        """CPU seconds of a search."""
        return DEFAULT_SEARCH_SECONDS if self.flags.seconds is None else float(self.flags.seconds)

    def with_images(self, images: ImagesPerPrompt) -> Workload:
        """Return the workload with images.

        Raises:
            PlanError: for images with more tokens than the run's data module keeps.
        """
        load, tokens = self.workload, math.ceil(images.tokens)
        if not self.counts_images or self.run is None:
            return replace(load, images=images, prompt_tokens=load.prompt_tokens + tokens)
        bounds_both = self.run.data.get("max_tokens") is not None
        setting, most = ("max_tokens", load.longest) if bounds_both else ("max_prompt_tokens", load.prompt_tokens)
        if tokens >= most:
            raise PlanError(
                f"{self.run.files}: the images of a prompt have {tokens:,} tokens, and data.init_args.{setting} allows "
                f"{most:,}; raise it, or shrink images, as max_pixels in processor_kwargs does"
            )
        prompt = max(load.prompt_tokens, tokens)
        response = load.longest - prompt if bounds_both else load.response_tokens
        return replace(load, images=images, prompt_tokens=prompt, response_tokens=response)

    def lighter(self) -> Iterator[tuple[str, PlanRequest]]:
        """Yield flags for training that needs less memory, with the request under them."""
        peft, half = f"--peft '{_SUGGESTED_PEFT}'", "--precision bf16-true"
        can_halve = self.flags.precision != "bf16-true"
        if not self.adapters:
            yield peft, self._with_adapters()
        if can_halve:
            yield half, self._in_half_precision()
        if can_halve and not self.adapters:
            yield f"{peft} {half}", self._with_adapters()._in_half_precision()

    def _with_adapters(self) -> PlanRequest:
        adapters = _adapters(_SUGGESTED_PEFT, self.dataflow)
        return replace(self, adapters=adapters, shares=_shares(self.flags, self.sources, adapters))

    def _in_half_precision(self) -> PlanRequest:
        return replace(self, flags=self.flags.clone().update("bf16-true", "precision"))


def parse_request(arguments: Sequence[str]) -> PlanRequest:
    """Parse and validate a command line.

    Raises:
        PlanError: for unknown, contradictory or missing flags.
        LayoutError: for an unknown cluster.
    """
    parser = plan_parser()
    given = parse_flags(parser, arguments, defaults=False)
    run = _read_run(given) if given.get("config") else None
    if run is not None:
        parser.set_defaults(dict(run.flags))
    flags = parse_flags(parser, arguments)
    if run is not None and flags.cluster is not None and ":" not in flags.cluster and run.devices is not None:
        flags.cluster = f"{flags.cluster}:{run.devices[0]}x{run.devices[1]}"
    refuse_contradictions(flags)
    if flags.algorithm not in ALGORITHMS:
        raise PlanError(f"--algorithm={flags.algorithm} is not one of {', '.join(ALGORITHMS)}")
    cluster = None if flags.cluster is None else ClusterSpec.parse(flags.cluster)
    sweep = () if flags.sweep is None else _sweep(flags.sweep)
    _refuse_too_many(cluster, sweep)
    budget = None if cluster is None else cluster.device_memory_bytes
    models = _models_of_flags(flags) if run is None else _models_of_run(run)
    return PlanRequest(
        flags=flags,
        **models,
        cluster=cluster,
        memory_budget=budget if flags.memory_per_device is None else parse_bytes(flags.memory_per_device),
        headroom=_headroom(flags),
        workload=_workload(flags, run),
        sweep=sweep,
        images=_images(given, flags, run, models),
        counts_images=run is not None and "prompt_length" in run.flags and "prompt_length" not in given,
        run=run,
        notes=() if run is None else (*_assumed_lengths(run, given, flags), *run.notes),
    )


def _images(given: Any, flags: Any, run: RunFile | None, models: Mapping[str, Any]) -> PlannedImages:
    """Return the images of prompts; without a run, there are as many as the flag says."""
    width, height = map(int, flags.image_size.split("x"))
    count = flags.images_per_prompt if run is None or "images_per_prompt" in given else None
    size = (width, height) if run is None or "image_size" in given else None
    return PlannedImages(count, size, (width, height), run, models["sources"][models["dataflow"].trained_roles[0]])


def _models_of_flags(flags: Any) -> dict[str, Any]:
    """Return the fields of a `PlanRequest` about models and calls."""
    sources = _sources(flags)
    dataflow = ALGORITHMS[flags.algorithm].dataflow_of(sources)
    adapters = {} if flags.peft is None else _adapters(flags.peft, dataflow)
    shares = _shares(flags, sources, adapters)
    return {"sources": sources, "adapters": adapters, "shares": shares, "dataflow": dataflow}


def _models_of_run(run: RunFile) -> dict[str, Any]:
    return {"sources": run.sources, "adapters": run.adapters, "shares": run.shares, "dataflow": run.dataflow}


def _workload(flags: Any, run: RunFile | None) -> Workload:
    default_tokens = DEFAULT_MICRO_BATCH_TOKENS if run is None else run.micro_batch_tokens(is_cpu=_is_cpu(flags))
    return Workload(
        num_sequences=flags.batch,
        prompt_tokens=flags.prompt_length,
        response_tokens=flags.response_length,
        micro_batch_tokens=flags.micro_batch_tokens or default_tokens,
        group_size=ALGORITHMS[flags.algorithm].group_size if run is None else run.module.group_size,
        num_minibatches=flags.num_minibatches,
        num_epochs=1 if run is None else run.options.num_epochs,
        samples_per_prompt=flags.responses_per_prompt,
    )


def _is_cpu(flags: Any) -> bool:
    return str(flags.cluster).strip().startswith("cpu")


# ---- configurations of fit
def _read_run(given: Any) -> RunFile:
    """Return the run of ``--config``, with the models and adapters of flags that are given."""
    files = ", ".join(given.config)
    if "algorithm" in given:
        raise PlanError(f"--algorithm={given.algorithm} and --config={files} both name the algorithm; leave one out")
    named = {role: given[role] for role in ROLES if role in given}
    models = {**_parse_models(given.get("model", []), named), **named}
    for role, model in models.items():
        if role not in ROLES or model == NO_MODEL:
            raise PlanError(
                f"{role}={model} with --config={files}: flags replace the models of {', '.join(ROLES)}; add or remove "
                f"a role in the file, as kl_coef and reward do"
            )
    content = read_content(given.config)
    run = planned_run(content, files, models)
    return planned_run(content, files, models, _adapters(given.peft, run.dataflow)) if "peft" in given else run


def _assumed_lengths(run: RunFile, given: Any, flags: Any) -> Iterator[str]:
    """Yield a sentence for lengths that the configuration does not bound; PlanError for an unknown batch."""
    if "batch" not in given and "batch" not in run.flags:
        raise PlanError(f"{run.files}: no data module of this package gives a batch_size under data; add --batch")
    names = [name for name in ("prompt_length", "response_length") if name not in given and name not in run.flags]
    if names:
        assumed = " and ".join(f"--{name.replace('_', '-')} {flags[name]}" for name in names)
        setting = "max_tokens" if "response_length" in names else "max_prompt_tokens"
        yield f"{assumed}: assumed, since data.init_args has no {setting} and no texts are read."


def _refuse_too_many(cluster: ClusterSpec | None, sweep: Sequence[int]) -> None:
    """Raise PlanError for clusters whose pricing would exhaust a laptop's memory."""
    if cluster is None:
        return
    num_devices = max(cluster.num_nodes, *sweep, 0) * cluster.devices_per_node
    if num_devices > MAX_DEVICES:
        raise PlanError(
            f"{num_devices:,} devices are more than the maximum of {MAX_DEVICES:,} for a search; use fewer nodes, "
            f"and run several such clusters side by side"
        )


def _headroom(flags: Any) -> float:
    if flags.check is not None or flags.compare is not None:
        return 0.0
    return HEADROOM if flags.headroom is None else float(flags.headroom)


def _sweep(text: str) -> tuple[int, ...]:
    key, _, values = text.partition("=")
    counts = [value.strip() for value in values.split(",")]
    if key.strip() != "nodes" or not all(value.isdecimal() and int(value) for value in counts):
        raise PlanError(f"--sweep={text} must be numbers of nodes, as in --sweep nodes=1,2,4,8")
    return tuple(dict.fromkeys(int(value) for value in counts))


# ---- models
def _adapters(text: str, dataflow: Dataflow) -> dict[str, AdapterSource]:
    """Parse ``--peft``: trained role -> its adapters."""
    given: Any = text
    if text.lstrip().startswith("{"):
        try:
            refuse_repeated_keys(text)
            given = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise PlanError(f"--peft={text} is not a valid mapping ({error}); {_PEFT_EXAMPLE}") from None
    elif not Path(expand_home(text)).is_dir():
        raise PlanError(f"--peft={text} is neither a mapping nor a folder of saved adapters; {_PEFT_EXAMPLE}")
    trained = dataflow.trained_roles
    if not (
        isinstance(given, dict)
        and given
        and all(isinstance(value, dict | str) for value in given.values())
        and not given.keys() & _LORA_OPTIONS
    ):
        return dict.fromkeys(trained, given)
    unknown = sorted(given.keys() - set(trained))
    if unknown:
        raise PlanError(f"--peft names {', '.join(unknown)}, but the trained roles are {', '.join(trained)}")
    return given


def _shares(flags: Any, sources: Mapping[str, str], adapters: Mapping[str, AdapterSource]) -> dict[str, str]:
    """Return ``reference: actor`` if an actor with adapters serves as its own reference, as in the algorithms."""
    named = flags.reference is not None or any(text.startswith("reference=") for text in flags.model)
    is_base = "actor" in adapters and sources.get("reference") == sources["actor"]
    return {"reference": "actor"} if is_base and not named else {}


def _sources(flags: Any) -> dict[str, str]:
    """Return every role's model; a flag for a single role enables the defaults of the others."""
    named = {role: flags[role] for role in ROLES if flags[role] is not None}
    sources = {**_parse_models(flags.model, named), **named}
    everything = ALGORITHMS[flags.algorithm].dataflow_of(
        (*ROLES, *_further_rewards(sources), *filter(has_own_model, sources))
    )
    for role in sources:
        if role not in everything.roles:
            raise PlanError(f"{flags.algorithm} has no role {role!r}; it has {', '.join(everything.roles)}")
    if named:
        sources = _defaults(sources, ALGORITHMS[flags.algorithm], has_critic="critic" in everything.roles)
    for role in everything.trained_roles:
        if sources.get(role, NO_MODEL) == NO_MODEL:
            raise PlanError(f"{flags.algorithm} trains its {role}, which has no model; add --{role} Qwen/Qwen3-0.6B")
    if "teacher" in everything.roles and sources.get("teacher", NO_MODEL) == NO_MODEL:
        raise PlanError(f"{flags.algorithm} learns from a teacher, which has no model; add --teacher Qwen/Qwen3-8B")
    return {role: sources[role] for role in everything.roles if sources.get(role, NO_MODEL) != NO_MODEL}


def _parse_models(texts: Sequence[str], named: Mapping[str, str]) -> dict[str, str]:
    """Parse every ``--model ROLE=MODEL``."""
    listed: dict[str, str] = {}
    for text in texts:
        role, separator, model = text.partition("=")
        if not separator or not role or not model:
            raise PlanError(f"--model={text} must name a role and its model, as in --model actor=Qwen/Qwen3-0.6B")
        if role in listed or role in named:
            other = f"--{role} {named[role]}" if role in named else f"--model {role}={listed[role]}"
            raise PlanError(f"{other} and --model {text} name two models for {role}; keep one")
        listed[role] = model
    return listed


def _further_rewards(sources: Mapping[str, str]) -> tuple[str, ...]:
    """Return the roles of reward models after the first; their numbers must be consecutive."""
    further = sorted((role for role in sources if is_further(role)), key=lambda role: (len(role), role))
    expected = [f"reward_{number}" for number in range(2, len(further) + 2)]
    if further != expected or (further and sources.get("reward", NO_MODEL) == NO_MODEL):
        raise PlanError(
            f"reward models are called reward, reward_2, reward_3, ..., but these are "
            f"{', '.join(role for role in ('reward', *further) if sources.get(role, NO_MODEL) != NO_MODEL)}; name them "
            f"in order: {', '.join(f'--model {role}=...' for role in ('reward', *expected))}"
        )
    return tuple(further)


def _defaults(sources: Mapping[str, str], algorithm: type, *, has_critic: bool) -> dict[str, str]:
    """Return a model for every role: reference = actor; critic and reward default to each other, else to the actor.

    Without a flag, there is no reward model without a critic, and no reference where ``kl_coef`` is 0 by default.
    """
    actor, reward = sources.get("actor", NO_MODEL), sources.get("reward", NO_MODEL)
    critic = sources.get("critic", actor if reward == NO_MODEL else reward)
    without = issubclass(algorithm, PolicyGradient) and algorithm.defaults.kl.weight == 0
    own = NO_MODEL if without else actor
    return {"actor": actor, "critic": critic, "reference": own, "reward": critic if has_critic else reward, **sources}


def load_plan(file: str, request: PlanRequest) -> ExecutionPlan:
    """Return the plan of a file, or of ``--config`` for `OWN_PLAN`."""
    if file == OWN_PLAN:
        assert request.run is not None, "--check without a file is refused without --config"
        plan = request.run.plan()
    else:
        plan = ExecutionPlan.load(file)
    refuse_offload_without_gpu(plan, "cpu" if request.is_cpu else "cuda")
    return plan
