r"""Read the final number of a text: in ``\boxed{}``, after ``####``, or else the last one. In linear time."""

from __future__ import annotations

import re
from fractions import Fraction

_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_PLAIN_NUMBER = rf"[-+]?{_DIGITS}?(?:\.\d+)?(?:[eE][-+]?\d{{1,3}})?"
# As in TeX, a part without braces is one digit.
_FRACTION = (
    rf"\\[cdt]?frac\s*(?:{{\s*(?P<above>{_PLAIN_NUMBER})\s*}}|(?P<digit_above>\d))"
    rf"\s*(?:{{\s*(?P<below>{_PLAIN_NUMBER})\s*}}|(?P<digit_below>\d)(?!\d))"
)
_QUOTIENT = rf"(?P<numerator>{_PLAIN_NUMBER})(?:\s*/\s*(?P<denominator>{_PLAIN_NUMBER}))?\s*(?P<percent>\\?%)?"
# A digit or point directly before is part of a longer number; a letter belongs to a name such as x2.
_FOUND = re.compile(
    rf"(?<![\w.])(?P<sign>[-+]?)(?:(?P<whole>{_DIGITS})\s*)?{_FRACTION}"
    rf"|(?<![\w.])(?P<mixed_sign>[-+]?)(?P<mixed>{_DIGITS}) +(?P<part>\d+)/(?P<parts>\d+)(?![\d./])"
    rf"|(?<![\w.])(?=[-+.\d]){_QUOTIENT}"
)
_MINUS_SIGNS = dict.fromkeys(map(ord, "\u2010\u2011\u2013\u2212\ufe63\uff0d"), "-")
_SEPARATOR = re.compile(r"(?<=\d)(?:\{,\}|,?\\[,!:; ]|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SPACE = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")
_SPACED = re.compile(r"(?:\A|=)[^\w=]*\d{1,3}(?: \d{3})+(?!\d)")
_CURRENCY = re.compile(r"(?<=[-+])\s*\\?[$€£¥]\s*(?=[\d.])")
_SPACED_SIGN = re.compile(r"(=\s*[-+])\s+(?=[\d.\\])")
_UNIT = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}(?:\s*\^\s*\{?\d+\}?)?")
_OPENING = re.compile(r"(?:[\s*$({\[]|\\[$(\[])*")
_LIST_NUMBER = re.compile(r"[\s*]*\d+[.)][ \t]+\S")
_BRACES = re.compile(r"\\boxed\s*\{|\\[{}]|[{}]")


def final_number(text: str) -> Fraction | None:
    r"""Return the number in the last ``\boxed{}``, or after the last ``####``, or else the last number of the text.

    ``1,234.5``, ``1{,}234``, ``1 234``, ``-3e2``, ``-$5``, ``3/4``, ``\frac{3}{4}``, ``3\frac12`` and ``12%`` are
    numbers; algebra is not supported. Spaces join digits in a box, at the beginning of a text and after ``=``. After
    ``####``, the number that follows directly counts, whatever is written after it, unless it numbers a heading. None
    if there is no number.
    """
    text = text.translate(_MINUS_SIGNS)
    boxed = last_boxed(text)
    if boxed is not None:
        answer = f"={boxed}"  # a sign at the beginning of a box belongs to its number
        return _last_value(_normalized(_SPACE.sub(",", answer)))
    if "####" not in text:
        return _last_value(_normalized(text))
    answer = _normalized(text.rpartition("####")[2])
    if _LIST_NUMBER.match(answer):
        return _last_value(answer)
    opening = _OPENING.match(answer)
    first = _FOUND.match(answer, opening.end() if opening else 0)
    number = None if first is None else _value(first)
    return _last_value(answer) if number is None else number


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last closed ``\boxed{...}``, including inner braces; None without one."""
    opened: list[int | None] = []
    """Open braces: the beginning of a box's content, None for others."""
    begin, end = -1, -1
    for match in _BRACES.finditer(text):
        if match[0] == "{":
            opened.append(None)
        elif match[0].startswith(r"\boxed"):
            opened.append(match.end())
        elif match[0] == "}" and opened and (content := opened.pop()) is not None and content > begin:
            begin, end = content, match.start()
    return None if begin < 0 else text[begin:end]


def _last_value(text: str) -> Fraction | None:
    numbers = [number for match in _FOUND.finditer(text) if (number := _value(match)) is not None]
    return numbers[-1] if numbers else None


def _normalized(text: str) -> str:
    """Return the text with commas between groups of three digits, and without units and spaces after a sign."""
    text = _SEPARATOR.sub(",", _UNIT.sub(" ", text))
    text = _SPACED.sub(lambda found: _SPACE.sub(",", found[0]), text)
    return _SPACED_SIGN.sub(r"\1", _CURRENCY.sub("", text))


def _value(match: re.Match[str]) -> Fraction | None:
    if match["above"] is not None or match["digit_above"]:
        above, below = _plain(match["above"] or match["digit_above"]), _plain(match["below"] or match["digit_below"])
        return _mixed(match["sign"], match["whole"] or "0", above, below)
    if match["mixed"]:
        above, below = _plain(match["part"]), _plain(match["parts"])
        is_proper = above is not None and below is not None and above < below
        return _mixed(match["mixed_sign"] if is_proper else "", match["mixed"] if is_proper else "0", above, below)
    above = _plain(match["numerator"])
    below = _plain(match["denominator"]) if match["denominator"] else Fraction(1)
    if above is None or not below:
        return above
    return above / below / (100 if match["percent"] else 1)


def _mixed(sign: str, whole: str, above: Fraction | None, below: Fraction | None) -> Fraction | None:
    """Return a whole number and a fraction, with one sign; None without one of them."""
    before = _plain(whole)
    if before is None or above is None or not below:
        return None
    return (-1 if sign == "-" else 1) * (before + above / below)


def _plain(text: str | None) -> Fraction | None:
    try:
        return Fraction((text or "").replace(",", ""))
    except ValueError:  # nothing, or only a sign or an exponent
        return None
