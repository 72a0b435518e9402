"""Make checkpoint folders without a training run, for tests of files and folders."""

from __future__ import annotations

from pathlib import Path

from lightning_realloc.strategies.checkpoints.checkpoint_files import FORMAT, file_records, write_description


def make_checkpoint(folder: Path, content: str) -> Path:
    """Write a complete checkpoint of one file and no roles."""
    folder.mkdir()
    (folder / "meta.pt").write_text(content)
    description = {"format": FORMAT, "algorithm": "SFT", "roles": {}}
    write_description(folder, description, file_records(folder, [folder / "meta.pt"]))
    return folder


def content_of(folder: Path) -> str:
    """Return the content that `make_checkpoint` wrote."""
    return (folder / "meta.pt").read_text()
