"""The rules that ``promtool check metrics`` keeps, so that they are kept without it, too.

Written after client_golang's package promlint and https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_NON_BASE_UNITS = {
    **dict.fromkeys(("minutes", "hours", "days", "weeks"), "seconds"),
    **dict.fromkeys(("kelvins", "fahrenheit", "rankine"), "celsius"),
    **dict.fromkeys(("inches", "yards", "miles"), "meters"),
    **dict.fromkeys(("pounds", "ounces"), "grams"),
    "bits": "bytes",
    "calories": "joules",
}
_BASE_UNITS = (
    *("amperes", "bytes", "celsius", "grams", "joules"),
    *("kelvin", "meters", "metres", "seconds", "volts"),
)
_PREFIXES = (
    *("pico", "nano", "micro", "milli", "centi", "deci", "deca", "hecto", "kilo", "kibi"),
    *("mega", "mibi", "giga", "gibi", "tera", "tebi", "peta", "pebi"),
)
_ABBREVIATIONS = {
    *("s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d"),
}
_KINDS = ("gauge", "counter", "summary", "histogram", "untyped")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def problems(name: str, kind: str, labels: Sequence[str], text: str) -> Iterator[str]:
    """What is wrong with a family; ``name`` is as a page shows it, a counter's with ``_total``."""
    if not text.strip():
        yield "no help text"
    for word in (name, *labels):
        if not _NAME.fullmatch(word):
            yield f"{word} is not in small letters and underscores alone"
    yield from _unit_problems(name)
    if (kind == "counter") != name.endswith("_total"):
        yield "counters, and only they, end with _total"
    if name.endswith(("_bucket", "_count", "_sum", "_created", "_info")):
        yield "its end is reserved"
    if {"le", "quantile"} & set(labels):
        yield "le and quantile are reserved labels"
    for word in _KINDS:
        if word in name.split("_"):
            yield f"its name says {word}"


def _unit_problems(name: str) -> Iterator[str]:
    for word in name.split("_"):
        if word in _ABBREVIATIONS:
            yield f"{word} is an abbreviation"
        bare = next((word.removeprefix(one) for one in _PREFIXES if word.startswith(one)), word)
        if word in _NON_BASE_UNITS:
            yield f"{word}: take {_NON_BASE_UNITS[word]}"
        elif bare != word and bare in (*_BASE_UNITS, *_NON_BASE_UNITS):
            yield f"{word}: take {_NON_BASE_UNITS.get(bare, bare)}"
