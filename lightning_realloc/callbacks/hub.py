"""How does a written model get to the Hugging Face hub? Where somebody named a repository, and only its own files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepository:
    """Where a model goes."""

    name: str
    """``user/model``, or ``model`` of whoever is logged in."""
    private: bool = True
    """Of a repository that is new; one that is there stays as it is."""

    def make(self) -> None:
        """Make sure that it is there and can be written to, before there is anything to write."""
        huggingface_hub.HfApi().create_repo(self.name, private=self.private, exist_ok=True)

    def upload(self, folder: Path, files: Sequence[str], *, message: str) -> None:
        """Upload some files of a folder as one commit."""
        huggingface_hub.HfApi().upload_folder(
            repo_id=self.name, folder_path=folder, allow_patterns=list(files), commit_message=message
        )


def file_marks(folder: Path) -> dict[str, tuple[int, int]]:
    """Return what changes of a folder's files when they are written: their times and sizes, by name."""
    files = [file for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    return {file.name: (file.stat().st_mtime_ns, file.stat().st_size) for file in files}
