"""Execution plan: the layout, ranks and options of every call, read from and written to YAML.

A plan is a value that can be printed, compared and hashed. The strategy carries it out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import yaml

from lightning_realloc.dataflow.dataflow import Dataflow, ModelFunctionCall
from lightning_realloc.dataflow.pipeline_schedule import ScheduleName
from lightning_realloc.dataflow.repeated_keys import refuse_repeated_keys
from lightning_realloc.errors import LayoutError, PlanError
from lightning_realloc.layout.dims import Layout, is_count
from lightning_realloc.layout.model import ModelLayout, ModelSpec
from lightning_realloc.output_files import write_text
from lightning_realloc.remote_path import expand_home
from lightning_realloc.tables import aligned, html_table

OPTIMIZER_SUFFIX = ".optimizer"
"""Suffix of a trained role's name in ``offload``; it stands for the state of the role's optimizer."""


_IN_A_CONFIGURATION = "; `plan --config` reads a configuration of `fit`; elsewhere, save its plan in a file of its own"
_OF_TOKENS = (
    "runs one token of a row at a time; train and infer with {axis}, generate with dp (or with tp, which also divides "
    "long prompts and their keys), fsdp or pp"
)
_OF_RUNS = "runs one token at a time, which would pass each rank {axis} times; leave {axis} out of this call"


@dataclass(frozen=True, slots=True)
class CallPlan:
    """Layout and options of one call.

    Example:
        >>> CallPlan.parse("actor.train", {"layout": "fsdp2.tp2@0-3", "gradient_checkpointing": True}).to_entry()
        {'layout': 'fsdp2.tp2@0-3', 'gradient_checkpointing': True}
    """

    layout: Layout
    """Degrees of parallelism and the ordered ranks."""
    micro_batch_tokens: int | None = None
    """Maximum number of tokens packed into one forward pass; None uses the algorithm's value."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; applies to training calls only."""
    max_slots: int = 64
    """Maximum number of sequences that a generation engine decodes at once, per data-parallel rank. With an
    environment, as many more may keep their keys and values while they wait for its answer."""
    activation_offload: bool = False
    """Keep activations in host memory until the backward pass; applies to training calls on CUDA devices only."""
    pipeline_schedule: ScheduleName = "1f1b"
    """Order of the passes of pipeline stages; applies to training calls with pp > 1 only. ``"zero_bubble"`` computes
    gradients of weights while a stage would wait."""

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is not None and not is_count(self.micro_batch_tokens):
            raise PlanError(
                f"micro_batch_tokens={self.micro_batch_tokens!r} must be a whole number, at least 1; or leave it out"
            )
        if not is_count(self.max_slots):
            raise PlanError(
                f"max_slots={self.max_slots!r} must be a whole number, at least 1: the sequences decoded at once"
            )
        for name in ("gradient_checkpointing", "activation_offload"):
            if not isinstance(getattr(self, name), bool):
                raise PlanError(f"{name}={getattr(self, name)!r} must be true or false")
        if self.pipeline_schedule not in get_args(ScheduleName):
            raise PlanError(
                f"pipeline_schedule={self.pipeline_schedule!r} must be one of {', '.join(get_args(ScheduleName))}; "
                f"interleaved stages are vpp in the layout, as in pp2.vpp2"
            )
        if self.pipeline_schedule != "1f1b" and self.layout.dims.pp == 1:
            raise PlanError(
                f"pipeline_schedule={self.pipeline_schedule!r} orders the passes of pipeline stages, and layout "
                f"{self.layout} has one stage; leave it out, or use pp > 1"
            )

    @property
    def options(self) -> tuple[int | None, bool, int, bool, ScheduleName]:
        """All fields but the layout, in the order in which the constructor takes them."""
        passes = self.micro_batch_tokens, self.gradient_checkpointing
        return *passes, self.max_slots, self.activation_offload, self.pipeline_schedule

    @classmethod
    def parse(cls, name: str, entry: object) -> CallPlan:
        """Read ``"fsdp2.tp2@0-3"`` or ``{layout: ..., micro_batch_tokens: ...}``; ``name`` is for messages."""
        if isinstance(entry, str):
            entry = {"layout": entry}
        if not isinstance(entry, Mapping) or "layout" not in entry:
            raise PlanError(f"calls.{name} is {entry!r}; write a layout such as 'fsdp4@0-3' or {{layout: fsdp4@0-3}}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(entry) - known)
        if unknown:
            raise PlanError(f"calls.{name} has no option {unknown[0]!r}; it has {', '.join(sorted(known))}")
        try:
            layout = Layout.parse(str(entry["layout"]))
            return cls(layout, **{key: value for key, value in entry.items() if key != "layout"})
        except (LayoutError, PlanError) as error:
            raise PlanError(f"calls.{name}: {error}") from None

    def suited(self, kind: str) -> CallPlan:
        """Return a copy without the options that do not apply to calls of this kind."""
        kept = [name for name in self._chosen() if kind in _OPTIONS_OF[name]]
        return CallPlan(self.layout, **{name: getattr(self, name) for name in kept})

    def unsuited(self, kind: str) -> str | None:
        """Return the first option that is set and does not apply to calls of this kind; None if all apply."""
        return next((name for name in self._chosen() if kind not in _OPTIONS_OF[name]), None)

    def _chosen(self) -> list[str]:
        return [f.name for f in fields(self) if f.name != "layout" and getattr(self, f.name) != f.default]

    def to_entry(self) -> str | dict[str, Any]:
        """Return the input of :meth:`parse`: the bare layout if no option is set."""
        chosen = {name: getattr(self, name) for name in self._chosen()}
        return {"layout": str(self.layout), **chosen} if chosen else str(self.layout)

    def to_text(self) -> str:
        """Return the entry of a plan file as one line of YAML."""
        text: str = yaml.safe_dump(self.to_entry(), default_flow_style=True, width=1000)
        return text.removesuffix("\n...\n").strip()


_OPTIONS_OF = {
    "micro_batch_tokens": ("infer", "train"),
    "gradient_checkpointing": ("train",),
    "max_slots": ("generate",),
    "activation_offload": ("train",),
    "pipeline_schedule": ("train",),
}
"""Option of a call's plan -> kinds of calls that use it."""


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Layout, ranks and options of every model function call.

    Example:
        >>> plan = ExecutionPlan.from_mapping({"calls": {"actor.generate": "tp4@0-3", "actor.train": "fsdp4@0-3"}})
        >>> plan.layout("actor.generate").dims.tp
        4
    """

    calls: tuple[tuple[str, CallPlan], ...]
    """Pairs of call name and plan, sorted by name so that equal plans compare equal."""
    offload: tuple[str, ...] = ()
    """State that leaves the device between the calls that need it: roles that are never trained, and optimizer states
    such as ``actor.optimizer``. Sorted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(sorted(self.calls, key=lambda item: item[0])))
        object.__setattr__(self, "offload", tuple(sorted(self.offload)))
        if len(set(self.offload)) < len(self.offload):
            raise PlanError(f"offload names everything once; got {', '.join(self.offload)}: remove the repeated name")
        names = [name for name, _ in self.calls]
        if len(set(names)) < len(names):
            raise PlanError(f"a plan names every call once; got {', '.join(names)}: remove the repeated name")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ExecutionPlan:
        """Read a plan from ``{"calls": {name: layout or options}, "offload": [role, ...]}``."""
        if (
            not isinstance(mapping, Mapping)
            or not set(mapping) <= {"calls", "offload"}
            or not isinstance(mapping.get("calls"), Mapping)
        ):
            raise PlanError(
                f"an execution plan has the key 'calls', with a layout for every call, and may have 'offload', a list "
                f"of roles; got {list(mapping) if isinstance(mapping, Mapping) else repr(mapping)}"
                f"{_IN_A_CONFIGURATION if isinstance(mapping, Mapping) and 'trainer' in mapping else ''}"
            )
        calls = tuple((str(name), CallPlan.parse(str(name), entry)) for name, entry in mapping["calls"].items())
        offload = mapping.get("offload") or []
        if not isinstance(offload, list | tuple) or not all(isinstance(part, str) for part in offload):
            raise PlanError(f"offload is {offload!r}; write a list of roles, as in [reference, reward]")
        return cls(calls, tuple(offload))

    @classmethod
    def load(cls, path: str | Path) -> ExecutionPlan:
        """Read a YAML file; every error names the file."""
        try:
            text = expand_home(Path(path)).read_text(encoding="utf-8-sig")
            refuse_repeated_keys(text)
            return cls.from_mapping(yaml.safe_load(text))
        except UnicodeDecodeError as error:
            raise PlanError(f"plan file {path} is not text; give a YAML file with the key 'calls'") from error
        except FileNotFoundError as error:
            raise PlanError(_describe_missing(Path(path))) from error
        except (OSError, yaml.YAMLError, PlanError) as error:
            raise PlanError(f"plan file {path}: {error}") from error

    @classmethod
    def static(cls, dataflow: Dataflow, layout: Layout) -> ExecutionPlan:
        """Return a plan with one layout for all calls, so that no weights move. This is the baseline."""
        return cls(tuple((call.name, CallPlan(layout)) for call in dataflow.model_calls))

    def to_mapping(self) -> dict[str, Any]:
        """Return the input of :meth:`from_mapping`."""
        calls = {name: plan.to_entry() for name, plan in self.calls}
        return {"calls": calls, "offload": list(self.offload)} if self.offload else {"calls": calls}

    def save(self, path: str | Path, *, comment: str = "") -> None:
        """Write the YAML file that :meth:`load` reads, with an optional comment in its first line."""
        head = f"# {' '.join(comment.split())}\n" if comment else ""
        write_text(path, head + yaml.safe_dump(self.to_mapping(), sort_keys=False))

    def call(self, name: str) -> CallPlan:
        """Return one call's plan; PlanError if the plan does not name the call."""
        for known, plan in self.calls:
            if known == name:
                return plan
        raise PlanError(f"the plan gives no layout for {name!r}; it names {', '.join(n for n, _ in self.calls)}")

    def layout(self, name: str) -> Layout:
        """Return one call's layout."""
        return self.call(name).layout

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Every distinct layout, in the order of the call names."""
        return tuple(dict.fromkeys(plan.layout for _, plan in self.calls))

    @property
    def digest(self) -> str:
        """Hash of the plan's text, equal on every rank that holds the same plan."""
        return hashlib.sha256(yaml.safe_dump(self.to_mapping()).encode()).hexdigest()

    def completed(self, dataflow: Dataflow) -> ExecutionPlan:
        """Return the plan, extended by the evaluation-only calls that it lacks, each in its role's home layout."""
        given = {name for name, _ in self.calls}
        spare = [c for c in dataflow.model_calls if c not in dataflow.iteration_calls and c.name not in given]
        homes = [(call, dataflow.home_call(str(call.role)).name) for call in spare]
        spare_plans = tuple((call.name, self.call(home).suited(call.kind)) for call, home in homes if home in given)
        return replace(self, calls=self.calls + spare_plans)

    def with_rest_of(self, other: ExecutionPlan) -> ExecutionPlan:
        """Return the plan, extended by the calls of ``other`` that it lacks."""
        given = {name for name, _ in self.calls}
        rest = tuple((name, plan) for name, plan in other.calls if name not in given)
        return replace(self, calls=self.calls + rest)

    def check(self, dataflow: Dataflow, world_size: int) -> None:
        """Check that the plan fits the algorithm and the number of ranks.

        Rules that need no model are here; rules on parameters are in :class:`ModelLayout`, see :meth:`check_models`.

        Raises:
            PlanError: for a call without a layout, a layout without a call, a rank beyond ``world_size``, an unused
                rank, an option that does not apply to its call, a generating call with ``cp > 1``, or with partners
                and ``fsdp`` or ``ep`` above 1, or an entry of ``offload`` that cannot be offloaded.
        """
        wanted = {call.name for call in dataflow.model_calls}
        given = {name for name, _ in self.calls}
        if extra := sorted(given - wanted):
            near = dict.fromkeys(name for one in extra for name in get_close_matches(one, wanted - given, n=1))
            is_reference = all(name.startswith("reference.") for name in extra) and not near
            hint = "; there is no reference with kl_coef=0, or without --reference" if is_reference else ""
            if extra == ["actor.generate"] and "actor" in dataflow.roles:  # of an algorithm that does not sample
                hint = "; callbacks=[Evaluation(...)] of the Trainer adds actor.generate"
            raise PlanError(
                f"the plan names {', '.join(extra)}, which this algorithm does not have"
                f"{_did_you_mean(near)}; it has {', '.join(sorted(wanted))}{hint}"
            )
        if missing := sorted(wanted - given):
            raise PlanError(f"the plan gives no layout for {', '.join(missing)}; add a line for each under 'calls'")
        for call in _evaluation_last(dataflow):
            name, plan = call.name, self.call(call.name)
            option = plan.unsuited(call.kind)
            if option is not None:
                raise PlanError(
                    f"calls.{name}: {option} applies only to calls that {' or '.join(_OPTIONS_OF[option])}; remove it"
                )
            axis = plan.layout.axis_without_generation
            if axis is not None and call.kind == "generate":
                raise PlanError(
                    f"calls.{name}: layout {plan.layout} has {axis}={getattr(plan.layout.dims, axis)}, and generation "
                    + (_OF_TOKENS if axis in plan.layout.token_axes else _OF_RUNS).format(axis=axis)
                )
            if call.partners:
                _check_asked(name, plan.layout)
            beyond = [rank for rank in plan.layout.ranks if rank >= world_size]
            if beyond:
                raise PlanError(
                    f"calls.{name}: layout {plan.layout} uses rank {beyond[0]}, but this run has "
                    f"{_counted(world_size, 'rank')} ({'0-' if world_size > 1 else ''}{world_size - 1}); use "
                    f"{_counted(max(plan.layout.ranks) + 1, 'device')}, or a plan for {world_size}"
                )

        used = {rank for _, plan in self.calls for rank in plan.layout.ranks}
        idle = [rank for rank in range(world_size) if rank not in used]
        if idle:
            raise PlanError(
                f"the plan leaves rank {idle[0]} without any call, and this run has "
                f"{_counted(world_size, 'rank')}; use {_counted(len(used), 'device')}, or a plan for {world_size}"
            )

        self._check_offload(dataflow)

    def check_models(self, dataflow: Dataflow, models: Mapping[str, ModelSpec]) -> None:
        """Check that every call's layout fits its model, by the rules of :class:`ModelLayout`.

        A rule that depends on the kind of a call belongs in :meth:`check`.

        Args:
            models: Role -> parameters of its model.

        Raises:
            LayoutError: for a layout that does not fit; the message names the call.
        """
        for call in _evaluation_last(dataflow):
            for role in (str(call.role), *call.further_roles):
                try:
                    ModelLayout(models[role], self.layout(call.name))
                except LayoutError as error:
                    raise LayoutError(f"calls.{call.name}: {error}") from None

    def _check_offload(self, dataflow: Dataflow) -> None:
        trained = dataflow.trained_roles
        possible = [role + OPTIMIZER_SUFFIX if role in trained else role for role in dataflow.roles]
        for part in self.offload:
            if part in trained:
                raise PlanError(
                    f"offload names {part!r}, which is trained and stays on the device; only its optimizer's state can "
                    f"be offloaded between training calls: write {part}{OPTIMIZER_SUFFIX}"
                )
            if part not in possible:
                raise PlanError(
                    f"offload names {part!r}, which this algorithm cannot offload; it can {', '.join(possible)}"
                )

    def table(self) -> str:
        """Return the plan as aligned text, one line per call."""
        offloaded = [("offload", ", ".join(self.offload))] if self.offload else []
        rows = [*((name, plan.to_text()) for name, plan in self.calls), *offloaded]
        return aligned(rows, left=(0, 1), indent="")

    def _repr_html_(self) -> str:
        """Return the plan as a table, which notebooks show."""
        rows = []
        for name, plan in self.calls:
            entry = plan.to_entry()
            options = {} if isinstance(entry, str) else {key: value for key, value in entry.items() if key != "layout"}
            rows.append([name, str(plan.layout), ", ".join(f"{key} {value}" for key, value in options.items())])
        offloaded = [["offload", ", ".join(self.offload), ""]] if self.offload else []
        return html_table(("call", "layout", "options"), rows + offloaded)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _did_you_mean(names: Collection[str]) -> str:
    return f" (did you mean {' or '.join(names)}?)" if names else ""


def _describe_missing(path: Path) -> str:
    """Return the error message for a plan file that does not exist, with files of similar names."""
    folder = path.parent
    files = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    near = [str(folder / name) for name in get_close_matches(path.name, files)]
    return (
        f"plan file {path}: there is no such file in {Path.cwd()}{_did_you_mean(near)}; give a file that "
        f"`lightning-realloc plan ... --save {path}` writes"
    )


def _check_asked(name: str, layout: Layout) -> None:
    """Refuse layouts of a call whose environments ask models while other ranks generate."""
    if layout.runs_in_lockstep:
        raise PlanError(
            f"calls.{name}: all ranks of layout {layout} run each block together, and environments of one rank ask "
            f"models while the others generate; give it a layout with fsdp=1 and ep=1"
        )


def _evaluation_last(dataflow: Dataflow) -> list[ModelFunctionCall]:
    """Return the calls with a model in an order in which no error names a call that `completed` added.

    Such a call copies the layout of an iteration's call, which is checked first.
    """
    return sorted(dataflow.model_calls, key=lambda call: call not in dataflow.iteration_calls)
