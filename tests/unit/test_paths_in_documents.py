"""Paths, tests and modules that documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`")

_LISTED = re.compile(r"`((?:[a-z_0-9]+/)+[\w.-]*)(?:::(\w+))?`")
"""A path, perhaps with the name of a test in it."""
_MODULE = re.compile(
    r"python -m ((?:deploy|loadtest|planning|tools|tests|router|worker|engine|baton)(?:\.\w+)*)"
)
COMMANDS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "docs/**/*.md")


def test_paths_in_the_glossary_exist() -> None:
    paths = _PATH.findall((ROOT / "docs/reference/glossary.md").read_text())
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_what_shows_an_ask_of_the_founding_texts_exists() -> None:
    listed = _LISTED.findall((ROOT / "docs/lab-notes/founding-texts.md").read_text())
    assert len(listed) > 150
    missing = [path for path, _ in listed if not (ROOT / path).exists()]
    tests = [(path, test) for path, test in listed if test and path not in missing]
    assert tests
    missing += [
        f"{path}::{test}" for path, test in tests if f"def {test}(" not in (ROOT / path).read_text()
    ]
    assert missing == []


def test_modules_that_documents_run_exist() -> None:
    pages = [page for pattern in COMMANDS for page in ROOT.glob(pattern)]
    named = {(page.name, name) for page in pages for name in _MODULE.findall(page.read_text())}
    assert len(named) > 20
    missing = []
    for page, name in sorted(named):
        path = ROOT.joinpath(*name.split("."))
        if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
            missing.append(f"{page}: {name}")
    assert missing == []
