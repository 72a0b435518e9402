"""Read the thumbnails that `RolloutTable` wrote next to its table, as addresses of data that a page can show.

Only small JPEG files of the run's own folder are read, and a page loads nothing else.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

IMAGES_COLUMN, IMAGES_FOLDER = "images", "rollouts_images"
MAX_THUMBNAILS = 300
"""Thumbnails of a report, of the newest samples; more make a larger page."""
MAX_THUMBNAIL_CHARACTERS = 2_000_000
"""Characters of all thumbnails of a report; more make a larger page."""
MAX_FILE_BYTES = 16_000
"""Largest file that is shown."""
_NAME = re.compile(r"[0-9a-f]{16}-[0-9]{1,4}\.jpg")
_JPEG = b"\xff\xd8\xff"
_ADDRESS = "data:image/jpeg;base64,"


def thumbnail_names(cell: str) -> tuple[str, ...]:
    """Return the files that a cell names; none for a cell that holds something else."""
    names: object = None
    with suppress(ValueError, RecursionError):  # any text, or JSON that was cut
        names = json.loads(cell)
    return checked_names(names)


def checked_names(names: object) -> tuple[str, ...]:
    """Return a list of names of thumbnails; nothing for any other value."""
    if not isinstance(names, list) or not all(isinstance(name, str) and _NAME.fullmatch(name) for name in names):
        return ()
    return tuple(names)


def read_thumbnails(folder: Path, cells: Iterable[str], problems: list[str]) -> dict[str, str]:
    """Return name -> address of data of the files that cells name, the first ones within the bounds of a report.

    Args:
        folder: Folder of the files.
        cells: Cells of the column with images, those of the newest samples first.
        problems: Gets a line if files are missing, or are no small JPEG files.
    """
    found: dict[str, str] = {}
    broken: set[str] = set()
    room = MAX_THUMBNAIL_CHARACTERS
    for name in (name for cell in cells for name in thumbnail_names(cell)):
        if name in found or name in broken:
            continue
        address = _address(folder / name)
        if address is None:
            broken.add(name)
            continue
        room -= len(address)
        if room < 0 or len(found) == MAX_THUMBNAILS:
            break
        found[name] = address
    if broken:
        problems.append(
            f"{len(broken)} images of the samples are missing in {folder.name}, or are no JPEG files of at most "
            f"{MAX_FILE_BYTES:,} bytes"
        )
    return found


def _address(path: Path) -> str | None:
    try:
        if path.is_symlink() or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    return _ADDRESS + base64.b64encode(content).decode() if content.startswith(_JPEG) else None
