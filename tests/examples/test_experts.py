"""The plan of the example with a mixture of experts fits its devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_realloc import cli

CONFIG = Path(__file__).parents[2] / "examples/experts.yaml"


def test_the_plan_fits_the_devices_that_it_names(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run(["plan", "--config", str(CONFIG), "--check", "--cluster", "h100"])
    text = capsys.readouterr().out
    assert "128 sequences of 512 + 1024 tokens, bf16-true, 80.0 GiB a device" in text
    assert "peak of rank 0-7: " in text
