"""Setting ``partners``: models that environments talk to, as roles of the algorithm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedTokenizerBase

from lightning_realloc.algorithms.base.generation_options import GenerationOptions
from lightning_realloc.algorithms.base.loaded_weights import ModelSource, check_source
from lightning_realloc.algorithms.base.role import Role
from lightning_realloc.algorithms.base.vocabulary import own_tokenizer, require_same_vocabulary
from lightning_realloc.dataflow.dataflow import ModelFunctionCall
from lightning_realloc.errors import ConfigError
from lightning_realloc.generation.core.capabilities import EngineName, require_capability
from lightning_realloc.generation.core.model_config import eos_ids_of

ACTOR = "actor"
"""Source of a partner that is the policy itself, as it is now."""
_OTHER_ROLES = ("reference", "critic", "reward", "teacher")
"""Roles that environments do not talk to."""
_PREFIX = "partner_"
"""Beginning of the role of a partner with a model of its own."""


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

    def __init__(self, partners: Mapping[str, ModelSource] | None, sources: dict[str, ModelSource]) -> None:
        self.by_name: dict[str, str] = {}
        """Role of each partner by its name."""
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
            if source in _OTHER_ROLES:
                raise ConfigError(
                    f"partners={{{name!r}: {source!r}}} names another role than the policy; give 'actor', or the model "
                    f"of that role, which is then loaded a second time"
                )
            self.by_name[name] = ACTOR if source == ACTOR else _PREFIX + name
            if source != ACTOR:
                check_source(f"partners[{name!r}]", source, way_out=", or 'actor' for self-play")
                sources[self.by_name[name]] = source

    @property
    def own_models(self) -> list[str]:
        """Roles with models of their own."""
        return [role for role in self.by_name.values() if has_own_model(role)]

    def check(self, engine: EngineName, options: GenerationOptions) -> None:
        """Raise ConfigError for settings of generation with which environments cannot talk to models."""
        if not self.by_name:
            return
        asked = f"partners={list(self.by_name)}"
        require_capability("partners", asked, engine=engine, error=ConfigError)
        if options.sample_reallocation:
            raise ConfigError(
                f"{asked} answer on the rank where a sample began, while all of its samples wait, and "
                f"sample_reallocation={options.sample_reallocation!r} moves them away; leave one of the two out"
            )

    def read_tokenizers(
        self, roles: Sequence[Role], actor: Role, tokenizer: Callable[[], PreTrainedTokenizerBase]
    ) -> None:
        """Read the tokenizers of models of their own; those without one must read the actor's tokens.

        Raises:
            ConfigError: for a model with another vocabulary and no tokenizer.
        """
        for role in roles:
            own = own_tokenizer(role)
            if own is not None:
                self.tokenizers[role.name] = own
            else:
                way_out = "give partners= a folder or name with a tokenizer"
                require_same_vocabulary(role, actor, tokenizer(), way_out=way_out)

    def speakers(
        self, models: Mapping[str, nn.Module], tokenizer: Callable[[], PreTrainedTokenizerBase]
    ) -> dict[str, Speaker]:
        """Return role -> how a model of its own is read."""
        found = {}
        for role in self.own_models:
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
