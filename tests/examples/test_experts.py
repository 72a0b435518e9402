"""The plan of the example with a mixture of experts fits its devices."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_realloc import cli

CONFIG = Path(__file__).parents[2] / "examples/experts.yaml"


def test_the_plan_fits_the_devices_that_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(CONFIG.read_text())
    trainer, model = config["trainer"], config["model"]["init_args"]
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(trainer["strategy"]["init_args"]["plan"]))
    num_responses, tokens = (model["sampling"][name] for name in ("n", "max_new_tokens"))
    settings = {
        "actor": model["actor"],
        "cluster": f"h100:1x{trainer['devices']}",
        "precision": trainer["precision"],
        "batch": config["data"]["init_args"]["batch_size"] * num_responses,
        "response-length": tokens,
        "check": tmp_path / "plan.yaml",
    }
    cli.run(["plan", *(text for name, value in settings.items() for text in (f"--{name}", str(value)))])
    assert "peak of rank 0-7: " in capsys.readouterr().out
