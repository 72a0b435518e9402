"""Setting ``partners``: models that environments talk to, as roles of the algorithm."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.loaded_weights import ModelSource, check_source
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.vocabulary import own_tokenizer, require_same_vocabulary
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.capabilities import EngineName, require_capability
from lightning_realloc.generation.core.model_config import eos_ids_of

ACTOR = "actor"
"""Source of a partner that is the policy itself, as it is now."""
_ROLES = (ACTOR, "reference", "teacher")
"""Roles that may be partners. They read and write as the actor does."""
_SILENT_ROLES = ("critic", "reward")
"""Roles that say nothing."""
_PREFIX = "partner_"
"""Beginning of the role of a partner with a model of its own."""


@dataclass(frozen=True, slots=True)
class ActorAverage:
    """Partner of environments that is an exponential moving average of the actor: its past self."""

    rate: float = 0.01
    """Weight of the actor in each update, which follows each of its training calls: 1 less the decay."""


PartnerSource: TypeAlias = ActorAverage | ModelSource  # jsonargparse reads any mapping as a config, which comes last
"""The model of a partner: a role's name, a model, or an average of the actor."""


@dataclass(frozen=True, slots=True)
class Speaker:
    """A model of its own that environments talk to."""

    tokenizer: PreTrainedTokenizerBase
    """Its tokenizer, with a chat template."""
    stop_token_ids: frozenset[int]
    """Tokens that end its turns."""


class PartnerRoles:
    """Roles of the models that an algorithm's environments talk to, and their tokenizers.

    Args:
        partners: The algorithm's setting.
        sources: The algorithm's sources by role, to which models of their own are added.

    Raises:
        ConfigError: for anything but names with models.
    """

    def __init__(self, partners: Mapping[str, PartnerSource] | None, sources: dict[str, ModelSource]) -> None:
        self.by_name: dict[str, str] = {}
        """Role of each partner by its name."""
        self.averages: dict[str, ActorAverage] = {}
        """Role -> average of the actor that it is."""
        self.tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        """Role -> tokenizer of a model of its own, if it has one; filled before models are built."""
        if partners is not None and (not isinstance(partners, Mapping) or not partners):
            raise ConfigError(
                f"partners={partners!r:.60} must name models, as in partners={{'seller': 'Qwen/Qwen3-0.6B'}}, or "
                f"partners={{'other': 'actor'}} for self-play; leave it out for none"
            )
        for name, source in (partners or {}).items():
            if not isinstance(name, str) or not name.isidentifier():
                raise ConfigError(f"partners[{name!r}] needs a name of letters, digits and _, which its role has too")
            if source in _SILENT_ROLES:
                raise ConfigError(
                    f"partners={{{name!r}: {source!r}}} names a model that scores and says nothing; give 'actor', "
                    f"'reference' or a language model"
                )
            _refuse_misspelt(name, source)
            role = self.by_name[name] = str(source) if source in _ROLES else _PREFIX + name
            if isinstance(source, ActorAverage):
                self.averages[role] = source
            elif source not in _ROLES:
                check_source(f"partners[{name!r}]", source, way_out=", or 'actor' for self-play")
                sources[role] = source

    @property
    def strangers(self) -> list[str]:
        """Roles with models of their own that need not speak as the actor does."""
        return [role for role in self.by_name.values() if has_own_model(role) and role not in self.averages]

    def own_roles(self, make_role: Callable[..., Role]) -> tuple[Role, ...]:
        """Return the roles of partners with models of their own; ``make_role`` makes them as the algorithm's.

        Raises:
            ConfigError: for the average of an actor of which adapters alone are trained.
        """
        made = [make_role(name, trained=False) for name in self.strangers]
        for name, average in self.averages.items():
            actor = make_role(ACTOR, trained=True)
            if actor.has_adapters:
                raise ConfigError(
                    f"{name} averages the actor's weights, and its adapters alone are trained; give 'actor' or the "
                    f"base's name as the partner"
                )
            made.append(replace(actor, name=name, trained=False, average_of=ACTOR, average_rate=average.rate))
        return tuple(made)

    def check_roles(self, roles: Sequence[Role]) -> None:
        """Raise ConfigError for a partner that is not among an algorithm's roles, or has no weights of its own."""
        known = {role.name: role for role in roles}
        for name, role in self.by_name.items():
            if role not in known:
                raise ConfigError(
                    f"partners={{{name!r}: {role!r}}} names a role that the algorithm does not have; it has "
                    f"{', '.join(known)}. Give kl_coef above 0 for a reference, or a model by its name"
                )
            if known[role].shares is not None:
                raise ConfigError(
                    f"partners={{{name!r}: {role!r}}} is the base of {known[role].shares}, whose adapters are merged "
                    f"into it during generation; give the base by its name, which loads it a second time"
                )

    def check(self, engine: EngineName) -> None:
        """Raise ConfigError for an engine with which environments cannot talk to models."""
        if not self.by_name:
            return
        require_capability("partners", f"partners={list(self.by_name)}", engine=engine, error=ConfigError)

    def read_tokenizers(self, roles: Sequence[Role], tokenizer: Callable[[], PreTrainedTokenizerBase]) -> None:
        """Read the tokenizers of `strangers`; those without one must read the actor's tokens.

        Raises:
            ConfigError: for a model with another vocabulary and no tokenizer.
        """
        known = {role.name: role for role in roles}
        for role in (known[name] for name in self.strangers):
            own = own_tokenizer(role)
            if own is not None:
                self.tokenizers[role.name] = own
            else:
                way_out = "give partners= a folder or name with a tokenizer"
                require_same_vocabulary(role, known[ACTOR], tokenizer(), way_out=way_out)

    def speakers(
        self, models: Mapping[str, nn.Module], tokenizer: Callable[[], PreTrainedTokenizerBase]
    ) -> dict[str, Speaker]:
        """Return role -> how a model of its own is read."""
        found = {}
        for role in self.strangers:
            own = self.tokenizers.get(role) or tokenizer()
            found[role] = Speaker(own, eos_tokens(own, models[role]))
        return found


def eos_tokens(tokenizer: PreTrainedTokenizerBase, model: nn.Module) -> frozenset[int]:
    """Return the end-of-sequence tokens of a tokenizer and a model."""
    eos = tokenizer.eos_token_id
    return eos_ids_of(model) | ({eos} if isinstance(eos, int) else set())


def has_own_model(role: str) -> bool:
    """Return whether a role is that of a partner with a model of its own."""
    return role.startswith(_PREFIX)


def with_partners(calls: Sequence[ModelFunctionCall], roles: Sequence[str]) -> tuple[ModelFunctionCall, ...]:
    """Return calls, of which those that generate let environments talk to models of these roles."""
    asked = tuple(dict.fromkeys(roles))
    return tuple(replace(call, partners=asked) if call.kind == "generate" else call for call in calls)


def _refuse_misspelt(name: str, source: object) -> None:
    """Raise ConfigError for a name that is nearly a role's, and no folder."""
    if isinstance(source, str) and source not in _ROLES and not Path(source).exists():
        for role in difflib.get_close_matches(source, _ROLES, n=1, cutoff=0.75):
            raise ConfigError(
                f"partners={{{name!r}: {source!r}}} is no role; did you mean {role!r}? A model of the hub has an "
                f"owner: 'owner/{source}'"
            )
