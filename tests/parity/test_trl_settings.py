"""Every key of TRL's configurations has a hint, and the documentation shows the hints."""

import pytest

from lightning_realloc.setting_hints import ALGORITHM_HINTS

pytest.importorskip("trl", reason="needs TRL: pip install 'lightning-realloc[parity]'")

from tests.parity import trl_settings


def test_every_key_of_trl_has_a_hint() -> None:
    assert sorted(trl_settings.keys().keys() - ALGORITHM_HINTS.keys()) == []


@pytest.mark.parametrize("page", trl_settings.PAGES)
def test_a_page_shows_the_hints(page: str) -> None:
    written = (trl_settings.DOCS / page).read_text()
    assert written == trl_settings.page_with_tables(page), "run: python -m tests.parity.trl_settings"
