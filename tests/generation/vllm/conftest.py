"""Keep the logs of failed vLLMs in the folders of the tests."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _temporary_files_go_with_the_test(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("vllm") is None:  # vLLM's sockets have short paths
        folder: Path = request.getfixturevalue("tmp_path_factory").mktemp("temporary")
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
