"""Old names of settings work for one release, with a warning at the line that uses them."""

import pytest

from lightning_realloc import ConfigError
from lightning_realloc.renamed_settings import rename_arguments, rename_settings


@rename_arguments(portions="chunks")
def cut(length: int, *, chunks: int = 1) -> int:
    return length // chunks


@rename_settings(portions="chunks")
class Cut:
    def __init__(self, chunks: int = 1) -> None:
        self.chunks = chunks


def test_an_old_name_of_an_argument_is_accepted_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"cut\(portions=\) is now cut\(chunks=\)") as caught:
        assert cut(12, portions=3) == 4  # type: ignore[call-arg]
    assert caught[0].filename == __file__
    assert cut(12, chunks=3) == 4


def test_an_old_name_of_a_setting_is_accepted_and_read_with_a_warning() -> None:
    with pytest.warns(DeprecationWarning, match=r"Cut\(portions=\) is now Cut\(chunks=\)") as caught:
        made = Cut(portions=3)  # type: ignore[call-arg]
        assert (made.chunks, made.portions) == (3, 3)  # type: ignore[attr-defined]
    assert {warning.filename for warning in caught} == {__file__}


def test_both_names_at_once_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cut\(portions=3, chunks=2\) sets one thing twice.* leave portions out"):
        cut(12, portions=3, chunks=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"Cut\(portions=3, chunks=2\) sets one thing twice"):
        Cut(portions=3, chunks=2)  # type: ignore[call-arg]
