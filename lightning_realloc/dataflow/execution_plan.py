"""Where every call of an iteration runs: its layout, its ranks, its options; read from YAML and written back.

A plan is a value: it can be printed, compared and hashed. Making it real is the strategy's work.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from lightning_realloc.dataflow.dataflow import Dataflow
from lightning_realloc.errors import LayoutError, PlanError
from lightning_realloc.layout.dims import Layout
from lightning_realloc.layout.model import ModelLayout, ModelSpec

OPTIMIZER_SUFFIX = ".optimizer"
"""After a trained role's name in ``offload``: the state of its optimizer."""


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One call's layout and options."""

    layout: Layout
    """Degrees of parallelism and the ordered ranks."""
    micro_batch_tokens: int | None = None
    """Most tokens that one forward pass packs together; None leaves it to the algorithm."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass; only training calls have one."""
    max_slots: int = 64
    """Most sequences that a generation engine decodes at once, per data-parallel rank."""

    def __post_init__(self) -> None:
        if self.micro_batch_tokens is not None and not _is_count(self.micro_batch_tokens):
            raise PlanError(
                f"micro_batch_tokens={self.micro_batch_tokens!r} must be a whole number, at least 1; or leave it out"
            )
        if not _is_count(self.max_slots):
            raise PlanError(
                f"max_slots={self.max_slots!r} must be a whole number, at least 1: the sequences decoded at once"
            )
        if not isinstance(self.gradient_checkpointing, bool):
            raise PlanError(f"gradient_checkpointing={self.gradient_checkpointing!r} must be true or false")

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
        """Return the plan without options that mean nothing to a call of this kind."""
        kept = [name for name in self._chosen() if kind in _OPTIONS_OF[name]]
        return CallPlan(self.layout, **{name: getattr(self, name) for name in kept})

    def unsuited(self, kind: str) -> str | None:
        """Return the first option that is set and means nothing to a call of this kind."""
        return next((name for name in self._chosen() if kind not in _OPTIONS_OF[name]), None)

    def _chosen(self) -> list[str]:
        return [f.name for f in fields(self) if f.name != "layout" and getattr(self, f.name) != f.default]

    def to_entry(self) -> str | dict[str, Any]:
        """Return what :meth:`parse` reads: the bare layout where no option is set."""
        chosen = {name: getattr(self, name) for name in self._chosen()}
        return {"layout": str(self.layout), **chosen} if chosen else str(self.layout)


_OPTIONS_OF = {
    "micro_batch_tokens": ("infer", "train"),
    "gradient_checkpointing": ("train",),
    "max_slots": ("generate",),
}
"""Option of a call's plan -> the kinds of calls that it means something to."""


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


class _EveryKeyOnce(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML's loader drops all but the last of equal keys; this one refuses them."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            line = node.start_mark.line + 1
            raise PlanError(f"{repeated} is given more than once in what begins in line {line}; keep one")
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


@dataclass(frozen=True, slots=True)
class ExecutionPlan:
    """Every model function call's layout, ranks and options."""

    calls: tuple[tuple[str, CallPlan], ...]
    """Call name and its plan, sorted by name so that equal plans compare equal."""
    offload: tuple[str, ...] = ()
    """What leaves the device between the calls that need it: roles that are never trained, and, as in
    ``actor.optimizer``, optimizer states. Sorted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", tuple(sorted(self.calls, key=lambda item: item[0])))
        object.__setattr__(self, "offload", tuple(sorted(self.offload)))
        if len(set(self.offload)) < len(self.offload):
            raise PlanError(f"offload names everything once; got {', '.join(self.offload)}: leave one out")
        names = [name for name, _ in self.calls]
        if len(set(names)) < len(names):
            raise PlanError(f"a plan names every call once; got {', '.join(names)}")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> ExecutionPlan:
        """Read a plan from ``{"calls": {name: layout or options}, "offload": [role, ...]}``."""
        unknown = sorted(set(mapping) - {"calls", "offload"})
        if unknown or not isinstance(mapping.get("calls"), Mapping):
            raise PlanError(
                f"an execution plan has the key 'calls', with a layout for every call, and may have 'offload', a list "
                f"of roles; got {list(mapping)}"
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
            content = yaml.load(Path(path).read_text(encoding="utf-8-sig"), Loader=_EveryKeyOnce)
            if not isinstance(content, Mapping):
                raise PlanError("an execution plan is a mapping with the key 'calls'")
            return cls.from_mapping(content)
        except UnicodeDecodeError as error:
            raise PlanError(f"plan file {path} is not text; give a YAML file with the key 'calls'") from error
        except (OSError, yaml.YAMLError, PlanError) as error:
            raise PlanError(f"plan file {path}: {error}") from error

    @classmethod
    def static(cls, dataflow: Dataflow, layout: Layout) -> ExecutionPlan:
        """One layout for every call: nothing ever moves. The baseline."""
        return cls(tuple((call.name, CallPlan(layout)) for call in dataflow.model_calls))

    def to_mapping(self) -> dict[str, Any]:
        """Return what :meth:`from_mapping` reads."""
        calls = {name: plan.to_entry() for name, plan in self.calls}
        return {"calls": calls, "offload": list(self.offload)} if self.offload else {"calls": calls}

    def save(self, path: str | Path, *, comment: str = "") -> None:
        """Write the YAML file that :meth:`load` reads, below a line of comment where one is given."""
        head = f"# {' '.join(comment.split())}\n" if comment else ""
        Path(path).write_text(head + yaml.safe_dump(self.to_mapping(), sort_keys=False), encoding="utf-8")

    def call(self, name: str) -> CallPlan:
        """Return one call's plan; PlanError when the plan does not name it."""
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
        """A hash of the plan's text, equal on every rank that holds the same plan."""
        return hashlib.sha256(yaml.safe_dump(self.to_mapping()).encode()).hexdigest()

    def completed(self, dataflow: Dataflow) -> ExecutionPlan:
        """Return the plan with a home layout for the calls that it leaves out and that only serve evaluation."""
        given = {name for name, _ in self.calls}
        spare = [c for c in dataflow.model_calls if c not in dataflow.iteration_calls and c.name not in given]
        homes = [(call, dataflow.home_call(str(call.role)).name) for call in spare]
        spare_plans = tuple((call.name, self.call(home).suited(call.kind)) for call, home in homes if home in given)
        return replace(self, calls=self.calls + spare_plans)

    def with_rest_of(self, other: ExecutionPlan) -> ExecutionPlan:
        """Return the plan with the calls of another one that it leaves out."""
        given = {name for name, _ in self.calls}
        rest = tuple((name, plan) for name, plan in other.calls if name not in given)
        return replace(self, calls=self.calls + rest)

    def check(self, dataflow: Dataflow, world_size: int) -> None:
        """Refuse a plan that does not fit the algorithm or the number of ranks.

        Raises:
            PlanError: for a call without a layout, a layout without a call, a rank beyond ``world_size`` or one that no
                call uses, an option that means nothing to its call, a pipeline that is to generate, or something to
                offload that cannot be.
        """
        wanted = {call.name for call in dataflow.model_calls}
        given = {name for name, _ in self.calls}
        if wanted - given:
            missing = ", ".join(sorted(wanted - given))
            raise PlanError(f"the plan gives no layout for {missing}; add a line for each under 'calls'")
        if given - wanted:
            extra = ", ".join(sorted(given - wanted))
            raise PlanError(f"the plan names {extra}, which this algorithm has not; it has {', '.join(sorted(wanted))}")
        for name, plan in self.calls:
            option = plan.unsuited(dataflow.call(name).kind)
            if option is not None:
                raise PlanError(
                    f"calls.{name}: {option} means nothing to a call that does not {' or '.join(_OPTIONS_OF[option])}; "
                    f"leave it out"
                )
            if plan.layout.dims.pp > 1 and dataflow.call(name).kind == "generate":
                raise PlanError(
                    f"calls.{name}: layout {plan.layout} has pp={plan.layout.dims.pp}, and every token would walk "
                    f"through all stages; train and infer with pp, generate with tp, dp or fsdp"
                )
            beyond = [rank for rank in plan.layout.ranks if rank >= world_size]
            if beyond:
                raise PlanError(
                    f"calls.{name}: layout {plan.layout} uses rank {beyond[0]}, but this run has {world_size} ranks "
                    f"(0-{world_size - 1}); use {max(plan.layout.ranks) + 1} devices, or a plan for {world_size}"
                )

        used = {rank for _, plan in self.calls for rank in plan.layout.ranks}
        idle = [rank for rank in range(world_size) if rank not in used]
        if idle:
            raise PlanError(
                f"the plan leaves rank {idle[0]} without any call, and this run has {world_size} ranks; "
                f"use {len(used)} devices, or a plan for {world_size}"
            )

        self._check_offload(dataflow)

    def check_models(self, dataflow: Dataflow, models: Mapping[str, ModelSpec]) -> None:
        """Refuse a layout that does not fit its model.

        Args:
            models: Role -> its parameters.

        Raises:
            LayoutError: naming the call.
        """
        for call in dataflow.model_calls:
            try:
                ModelLayout(models[str(call.role)], self.layout(call.name))
            except LayoutError as error:
                raise LayoutError(f"calls.{call.name}: {error}") from None

    def _check_offload(self, dataflow: Dataflow) -> None:
        trained = dataflow.trained_roles
        possible = [role + OPTIMIZER_SUFFIX if role in trained else role for role in dataflow.roles]
        for part in self.offload:
            if part in trained:
                raise PlanError(
                    f"offload names {part!r}, which is trained and stays; its optimizer's state can leave between "
                    f"training calls: write {part}{OPTIMIZER_SUFFIX}"
                )
            if part not in possible:
                raise PlanError(
                    f"offload names {part!r}, which this algorithm cannot offload; it can {', '.join(possible)}"
                )

    def table(self) -> str:
        """Return the plan as aligned text, one call a line."""
        lines = [(name, plan.to_entry()) for name, plan in self.calls]
        if self.offload:
            lines.append(("offload", ", ".join(self.offload)))
        width = max((len(name) for name, _ in lines), default=0)
        return "\n".join(f"{name:<{width}}  {entry}" for name, entry in lines)
