"""Old paths of public classes and functions: importable, the same objects, and deprecated."""

from __future__ import annotations

import importlib
import pickle
import sys

import jsonargparse
import pytest

from lightning_realloc import GRPO, SamplingParams
from lightning_realloc.moved_modules import MOVED, MOVED_NAMES


@pytest.mark.parametrize("old", MOVED)
def test_an_old_path_is_the_module_at_its_new_path(old: str) -> None:
    sys.modules.pop(f"lightning_realloc.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"lightning_realloc.{old} is now lightning_realloc.{MOVED[old]}"):
        module = importlib.import_module(f"lightning_realloc.{old}")
    assert module is importlib.import_module(f"lightning_realloc.{MOVED[old]}")
    assert module.__name__ == module.__spec__.name == f"lightning_realloc.{MOVED[old]}"


@pytest.mark.parametrize("old", MOVED_NAMES)
def test_an_old_name_in_a_module_that_still_exists_is_the_object_at_its_new_path(old: str) -> None:
    (module, name), (home, new_name) = (path.rsplit(".", 1) for path in (old, MOVED_NAMES[old]))
    with pytest.warns(DeprecationWarning, match=f"lightning_realloc.{old} is now lightning_realloc.{MOVED_NAMES[old]}"):
        found = getattr(importlib.import_module(f"lightning_realloc.{module}"), name)
    assert found is getattr(importlib.import_module(f"lightning_realloc.{home}"), new_name)


def test_new_paths_and_unknown_names_are_left_to_python() -> None:
    with pytest.raises(AttributeError, match=r"'lightning_realloc\.algorithms\.rollout' has no attribute 'sample'"):
        getattr(importlib.import_module("lightning_realloc.algorithms.rollout"), "sample")  # noqa: B009
    with pytest.raises(ModuleNotFoundError, match=r"lightning_realloc\.algorithms\.grpos"):
        importlib.import_module("lightning_realloc.algorithms.grpos")
    assert GRPO.__module__ == "lightning_realloc.algorithms.grpo"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_yaml_file_that_names_an_old_class_path_is_read() -> None:
    parser = jsonargparse.ArgumentParser()
    parser.add_argument("--sampling", type=SamplingParams)
    given = {"class_path": "lightning_realloc.generation.sampling.SamplingParams", "init_args": {"max_new_tokens": 7}}
    chosen = parser.instantiate_classes(parser.parse_object({"sampling": given})).sampling
    assert chosen == SamplingParams(max_new_tokens=7)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_pickle_that_names_an_old_path_is_read() -> None:
    written = pickle.dumps(SamplingParams(max_new_tokens=7), protocol=0)
    old = written.replace(b"generation.core.sampling", b"generation.sampling")
    assert old != written
    assert pickle.loads(old) == SamplingParams(max_new_tokens=7)
