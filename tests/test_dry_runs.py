"""What the pool's processes remember of a checked model changes with all that a dry run depends on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from lightning_realloc.errors import ConfigError
from tests.dry_runs import _described_once, _remembered, structure
from tests.models import tiny_model


def _other_class(model: nn.Module) -> None:
    model.model.norm = nn.LayerNorm(64)


def _other_code(model: nn.Module) -> None:
    model.model.norm.forward = lambda hidden: hidden


def _other_attribute(model: nn.Module) -> None:
    model.model.norm.variance_epsilon = 1.0


def _other_shape(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight[:5])


def _other_configuration(model: nn.Module) -> None:
    model.config.hidden_act = "relu"


CHANGES = [_other_class, _other_code, _other_attribute, _other_shape, _other_configuration]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_another_structure(change: Callable[[nn.Module], None]) -> None:
    model = tiny_model("llama")
    assert structure(model) == structure(tiny_model("llama", seed=1))
    change(model)
    assert structure(model) != structure(tiny_model("llama"))


def test_a_patched_class_has_another_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    before = structure(model)
    monkeypatch.setattr(type(model.model.norm), "forward", lambda self, hidden: hidden)
    assert structure(model) != before


def test_only_models_that_passed_are_not_checked_again() -> None:
    checked: list[str] = []

    def check(model: nn.Module, answer: str | None) -> str | None:
        checked.append(str(answer))
        if answer == "refused":
            raise ConfigError(answer)
        return answer

    remembered, model = _remembered(check), tiny_model("llama")
    assert [remembered(model, answer) for answer in (None, None, "layer", "layer")] == [None, None, "layer", "layer"]
    for _ in range(2):
        with pytest.raises(ConfigError, match="refused"):
            remembered(model, "refused")
    assert checked == ["None", "layer", "layer", "refused", "refused"]


def _untie(model: nn.Module) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _plan_otherwise(model: nn.Module) -> None:
    model._tp_plan = {}


@pytest.mark.parametrize("change", [_untie, _plan_otherwise, _other_configuration])
def test_a_changed_model_or_option_is_described_again(change: Callable[[nn.Module], None]) -> None:
    described: list[int] = []

    def describe(model: nn.Module, *, max_tp: int) -> int:
        described.append(max_tp)
        return len(described)

    known, changed = _described_once(describe), tiny_model("qwen2")  # whose head is tied
    change(changed)
    asked = [(tiny_model("qwen2"), 1), (tiny_model("qwen2", seed=1), 1), (tiny_model("qwen2"), 2), (changed, 1)]
    assert [known(model, max_tp=max_tp) for model, max_tp in asked] == [1, 1, 2, 3]
