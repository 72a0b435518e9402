"""Drafters written for earlier releases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lightning_realloc.generation import GenerationEngine, SamplingParams, Speculation
from lightning_realloc.generation.core.sample import Sample
from lightning_realloc.generation.speculative.drafter import Draft, Drafter
from lightning_realloc.generation.speculative.lookup import HistoryDrafter
from tests.generation.markov import target
from tests.generation.speculative.drafters import prompts_of, tokens_of


def test_a_drafter_written_for_earlier_releases_drafts_the_same_and_warns() -> None:
    class Earlier(Drafter):
        def propose(self, running: Any, limits: Any, chance: Any, least_survivals: Any) -> list[Draft]:  # type: ignore[override]
            assert chance(("any", 1)) == 1.0 and list(least_survivals) == [0.0] * len(limits)
            return [Draft([5], [("any", 1)]).cut(limit) for limit in limits]

    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    fixed = Speculation(drafter="none", num_draft_tokens=2)
    with pytest.warns(DeprecationWarning, match=r"Earlier.propose takes chance .* propose\(self, running"):
        engine = GenerationEngine(target(), speculation=fixed, drafter=Earlier())
    plain = GenerationEngine(target())
    assert tokens_of(engine.generate(prompts_of(3), params)) == tokens_of(plain.generate(prompts_of(3), params))
    assert engine.stats.drafted_tokens > 0


@pytest.mark.parametrize("base", [Drafter, HistoryDrafter])
def test_methods_under_the_names_of_earlier_releases_are_called_and_warn(base: type[Drafter]) -> None:
    with pytest.warns(DeprecationWarning) as warned:

        class Earlier(base):  # type: ignore[misc, valid-type]
            def is_acquainted(self, samples: Sequence[Sample]) -> bool:
                assert not super().is_acquainted(samples)
                return True

            def hear(self, news: Any) -> None:
                super().hear(news)
                self.heard = list(news)

    assert [str(each.message).split(",")[0] for each in warned] == [
        "Earlier.is_acquainted is now called has_seen_prompts",
        "Earlier.hear is now called receive_news",
    ]
    drafter = Earlier()
    assert drafter.has_seen_prompts([Sample(0, 0, [5], 4, 0)])
    drafter.receive_news([((5,), (1,))])
    assert drafter.heard == [((5,), (1,))]


def test_method_names_of_earlier_releases_call_the_current_methods() -> None:
    drafter = HistoryDrafter()
    drafter.hear([((5,), (1,))])
    assert drafter.is_acquainted([Sample(0, 0, [5], 4, 0)])
