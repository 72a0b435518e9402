"""Remove what failed and killed saves have left next to a checkpoint, also under names that no later save has.

Files of a save that may still be under way, of this run or of another one, are kept.
"""

from __future__ import annotations

import logging

from lightning_realloc.errors import describe_error
from lightning_realloc.remote_path import AnyPath, RemotePath, as_path
from lightning_realloc.strategies.checkpoints.checkpoint_files import ROLES_FILE
from lightning_realloc.strategies.checkpoints.folders import abandoned_partials, remove
from lightning_realloc.strategies.checkpoints.safety.failed_saves import FailedSaves

log = logging.getLogger(__name__)

ABANDONED_IN_STORE_AFTER_S = 86_400.0
"""Seconds without a new file after which an unfinished save in a store is removed. A large file appears at its end
alone, so fewer could take a slow upload for one that was killed."""


class Leftovers:
    """What saves have left that did not end.

    Args:
        failed: Failed saves of this run. Their files are removed at once: none of them is under way.
    """

    def __init__(self, failed: FailedSaves) -> None:
        self._failed = failed
        self._num_removed = 0
        self._searched: set[RemotePath] = set()

    def remove_next_to(self, checkpoint: AnyPath) -> None:
        """Remove leftovers in the folder of a complete checkpoint. For the first rank, while it saves nothing.

        A store is searched once for those of earlier runs. An error is logged, and the next call tries again.
        """
        try:
            if isinstance(checkpoint, RemotePath):
                self._remove_failed()
                self._search(checkpoint)
            else:
                for left in abandoned_partials(checkpoint.parent):
                    remove(left)
                    log.info("removed %s, which an earlier save left before it was complete", left)
        except Exception as error:  # stores raise errors of any class
            log.info("leftovers of earlier saves next to %s were not removed: %s", checkpoint, describe_error(error))

    def _remove_failed(self) -> None:
        from lightning_realloc.strategies.checkpoints.remote.remote_target import unfinished_saves

        for one in self._failed.saves[self._num_removed :]:
            folder = as_path(one.path)
            for save in unfinished_saves(folder) if isinstance(folder, RemotePath) else ():
                save.remove_below(save.files())
            self._num_removed += 1

    def _search(self, checkpoint: RemotePath) -> None:
        from lightning_realloc.strategies.checkpoints.remote.remote_target import unfinished_saves

        if checkpoint.parent in self._searched:
            return
        now_s = (checkpoint / ROLES_FILE).modified_s()  # by the store's clock
        for entry in checkpoint.parent.iterdir():
            for save in unfinished_saves(entry):
                files = save.files()
                times_s = [file.modified_s() for file in files]
                if all(times_s) and max(times_s, default=now_s) + ABANDONED_IN_STORE_AFTER_S < now_s:
                    save.remove_below(files)
                    log.info("removed %s, which an earlier save left before it was complete", save)
        self._searched.add(checkpoint.parent)
