"""Settings of speculative decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import Literal, get_args

from torch import nn

from lightning_realloc.errors import GenerationError, require_choice
from lightning_realloc.generation.core.params import SamplingParams, check_kind
from lightning_realloc.generation.speculative.verify import GumbelDraws, KeyedDraws, Rejection, Verification
from lightning_realloc.setting_hints import SPECULATION_HINTS, suggest_settings

DrafterName = Literal["ngram", "history", "model", "blocks", "none"]
VerificationName = Literal["match", "gumbel", "reject"]


@suggest_settings(SPECULATION_HINTS)
@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """How to draft and verify tokens. Responses follow the model's distribution with any of these settings."""

    drafter: DrafterName = "history"
    """``"ngram"``: look up n-grams in the sample's own text; ``"history"``: also in earlier responses to its prompt and
    in finished siblings; ``"model"``: ``draft_model``; ``"blocks"``: the model's own first ``draft_blocks``;
    ``"none"``: draft nothing."""
    verification: VerificationName = "match"
    """``"match"``: the same tokens as without speculation; ``"gumbel"``: the same tokens with any drafts, and more
    accepted ones from models; ``"reject"``: the same distribution, but other tokens with other drafts."""
    num_draft_tokens: int | None = None
    """Tokens drafted ahead of each sample in a step; None: as many as pay."""
    max_draft_tokens: int = 8
    """Most tokens drafted ahead of each sample in a step where ``num_draft_tokens`` is None."""
    draft_model: str | Path | nn.Module | None = None
    """A causal language model with the same tokenizer: its name or folder, or the model itself, which is copied."""
    draft_learning_rate: float | None = None
    """Learning rate at which ``draft_model`` learns from every generation's responses; None: it does not learn."""
    draft_blocks: int | None = None
    """Number of the model's first blocks that draft, for ``drafter="blocks"``."""

    def __post_init__(self) -> None:
        require_choice("drafter", self.drafter, get_args(DrafterName), GenerationError)
        require_choice("verification", self.verification, get_args(VerificationName), GenerationError)
        for name, least in (("num_draft_tokens", 0), ("max_draft_tokens", 1), ("draft_blocks", 1)):
            value = getattr(self, name)
            check_kind(name, value, Integral, "a whole number", optional=name != "max_draft_tokens")
            if value is not None and value < least:
                raise GenerationError(f"{name}={value} must be at least {least}")
        kinds = (str, Path, nn.Module)
        check_kind("draft_model", self.draft_model, kinds, "a name, a folder or a model", optional=True)
        rate = self.draft_learning_rate
        check_kind("draft_learning_rate", rate, Real, "a number", optional=True)
        if rate is not None and self.drafter != "model":
            raise GenerationError(
                f"drafter={self.drafter!r} has no use for draft_learning_rate={rate}: a draft model learns; leave it "
                f"out, or set drafter='model'"
            )
        if rate is not None and not 0 < rate < math.inf:
            raise GenerationError(
                f"draft_learning_rate={rate} must be a finite number above 0; None: the draft model stays as it is"
            )
        for name, drafter in (("draft_model", "model"), ("draft_blocks", "blocks")):
            given, wanted = getattr(self, name) is not None, self.drafter == drafter
            if given != wanted:
                raise GenerationError(
                    f"drafter={self.drafter!r} {'needs' if wanted else 'has no use for'} {name}; "
                    f"{'set it, or use another drafter' if wanted else f'leave it out, or set drafter={drafter!r}'}"
                )

    def __repr__(self) -> str:
        """Show settings that differ from their defaults, and a model by its class alone."""
        given = ((own.name, getattr(self, own.name), own.default) for own in fields(self))
        changed = (f"{name}={_shown(value)}" for name, value, default in given if value != default)
        return f"Speculation({', '.join(changed)})"

    @property
    def most_ahead(self) -> int:
        """Most tokens that a step may verify after a sample's last one."""
        return self.max_draft_tokens if self.num_draft_tokens is None else self.num_draft_tokens

    def rule(self, params: SamplingParams) -> Verification:
        """Return the verification rule for responses that are sampled with ``params``."""
        rules: dict[str, type[Verification]] = {"match": KeyedDraws, "gumbel": GumbelDraws, "reject": Rejection}
        return rules[self.verification](params)  # type: ignore[call-arg]


def _shown(value: object) -> str:
    return f"{type(value).__name__}(...)" if isinstance(value, nn.Module) else repr(value)
