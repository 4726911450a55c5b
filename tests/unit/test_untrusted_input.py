"""The page of untrusted input names every parser of foreign text, and what fuzzes it."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

from tests.fuzz.__main__ import NAMES

_PAGE = Path(__file__).parents[2] / "docs/explanation/untrusted-input.md"
_EXTRAS = {"uvicorn": "standard"}
"""Extras of packages that Baton requires."""


def _section() -> str:
    text = _PAGE.read_text()
    return text[text.index("## Parsers") : text.index("## The event loop")]


def _targets() -> dict[str, str]:
    """Return the last cell of each row, by its first."""
    rows = [line.strip("|").split("|") for line in _section().splitlines() if line.startswith("|")]
    return {row[0].strip(): row[-1].strip() for row in rows[2:]}


def test_every_parser_has_a_fuzz_target_or_a_reason() -> None:
    for parser, cell in _targets().items():
        named = re.findall(r"`([^`]+)`", cell)
        assert named or cell.startswith("none: "), parser
        assert set(named) <= set(NAMES), parser


def test_every_fuzz_target_tries_a_parser() -> None:
    named = {name for cell in _targets().values() for name in re.findall(r"`([^`]+)`", cell)}
    # The fuzzer of answers compares tokens: it tries no parser.
    assert named == set(NAMES) - {"answers"}


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _required() -> dict[str, importlib.metadata.Distribution]:
    """Return what Baton requires, directly or not, by name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    pending = ["baton-llm"]
    while pending:
        name = _normal(pending.pop())
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            # Another system requires it.
            continue
        for line in found[name].requires or ():
            required, _, condition = line.partition(";")
            match = re.match(r"[A-Za-z0-9_.-]+", required)
            wanted = "extra ==" not in condition or _EXTRAS.get(name, "no extra") in condition
            if match is not None and wanted:
                pending.append(match[0])
    return found


def test_every_required_package_with_native_code_is_named() -> None:
    named = {_normal(name) for name in re.findall(r"`([^`]+)`", _section())}
    native = {
        name
        for name, one in _required().items()
        if any(file.suffix == ".so" or ".so." in file.name for file in one.files or ())
    }
    assert "llguidance" in native
    # Packages of CUDA come with torch on other machines.
    assert {name for name in native if not name.startswith("nvidia-")} <= named
