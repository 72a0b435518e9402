"""The notebook of the tour runs from its first to its last cell, and shows its pictures."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_tour_runs_and_shows_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(ROOT / "examples" / "tour.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "it is committed without outputs"
    client = nbclient.NotebookClient(notebook, timeout=170, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    assert len(shown) == 5
    plan, simulated, moved, measured, report = shown
    assert "actor.generate" in plan and "<table>" in plan
    assert simulated.startswith("<svg") and "rank 7" in simulated
    assert "must" in moved
    assert "rank 1" in measured and "actor.train" in measured
    assert "<iframe srcdoc=" in report
