"""Which number does a text end on? Plain numbers, exactly: no algebra, no units."""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?"
_FRACTION = rf"(?P<sign>[-+]?)\\[dt]?frac\s*{{\s*(?P<above>{_NUMBER})\s*}}\s*{{\s*(?P<below>{_NUMBER})\s*}}"
_QUOTIENT = rf"(?P<numerator>{_NUMBER})(?:\s*/\s*(?P<denominator>{_NUMBER}))?\s*(?P<percent>\\?%)?"
# A digit or a point right before is the middle of a number; a letter, of a name such as x2.
_FOUND = re.compile(rf"(?<![\w.]){_FRACTION}|(?<![\w.])(?=[-+.\d]){_QUOTIENT}")


def final_number(text: str) -> Fraction | None:
    r"""Return the number in the last ``\boxed{}``, or after the last ``####``, or else the last one of the text.

    ``1,234.5``, ``-3e2``, ``3/4``, ``\frac{3}{4}`` and ``12%`` are numbers; None where there is none.
    """
    boxed = last_boxed(text)
    if boxed is not None:
        text = boxed
    elif "####" in text:
        text = text.rpartition("####")[2]
    numbers = [number for match in _FOUND.finditer(text) if (number := _value(match)) is not None]
    return numbers[-1] if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Return what is in the last ``\boxed{...}`` that is closed, braces within it included; None without one."""
    end = len(text)
    while (begin := text.rfind(r"\boxed{", 0, end)) >= 0:
        content = begin + len(r"\boxed{")
        depth = 1
        for position in range(content, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[content:position]
        end = begin
    return None


def _value(match: re.Match[str]) -> Fraction | None:
    if match["above"] is not None:
        above, below = _plain(match["above"]), _plain(match["below"])
        sign = -1 if match["sign"] == "-" else 1
        return sign * above / below if above is not None and below else None
    above = _plain(match["numerator"])
    below = _plain(match["denominator"]) if match["denominator"] else Fraction(1)
    if above is None or not below:
        return above
    return above / below / (100 if match["percent"] else 1)


def _plain(text: str) -> Fraction | None:
    try:
        return Fraction(text.replace(",", ""))
    except ValueError:  # a sign or an exponent alone
        return None
