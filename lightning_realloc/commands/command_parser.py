"""Parser of a command's flags. It needs neither torch nor Lightning."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import NoReturn

from lightning_realloc.entry import summary_of
from lightning_realloc.errors import ConfigError
from lightning_realloc.setting_hints import hint_for


class CommandParser(argparse.ArgumentParser):
    """Parser that raises ConfigError for a wrong command line, with similar flags; only ``--help`` exits.

    Args:
        command: Name of the command.
        epilog: Text below the flags in ``--help``.
        flag_of: Returns the flag for a setting that has no short one; None for an unknown setting.
    """

    def __init__(
        self, command: str, *, epilog: str = "", flag_of: Callable[[str], str | None] = lambda setting: None
    ) -> None:
        super().__init__(
            prog=f"lightning-realloc {command}",
            description=summary_of(command),
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._flag_of = flag_of

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Return the flags.

        Raises:
            ConfigError: for an unknown flag, or for a value of another type.
        """
        flags, unknown = self.parse_known_args(list(arguments))
        if unknown:
            self.error(f"there is no flag {unknown[0]}{self._hint(unknown[0])}")
        return flags

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message} ({self.prog} --help lists all flags)")

    def _hint(self, unknown: str) -> str:
        name = unknown.partition("=")[0]
        dashed, setting = name.replace("_", "-"), name.lstrip("-").replace("-", "_")
        own = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(dashed, own, n=2, cutoff=0.7)
        if dashed not in own and (flag := self._flag_of(setting)) is not None:
            near = [flag, *near]
        if near:
            return f"; did you mean {' or '.join(near[:2])}?"
        elsewhere = hint_for(setting)
        return "" if elsewhere is None else f"; {setting} is here {elsewhere}"
