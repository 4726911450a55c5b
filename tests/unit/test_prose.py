"""Words and paths in documents.

The check knows few words, none of which has a proper use in the listed files. Code, in backticks,
is not checked. Add a file once it is clean, and a word once no listed file has it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CLEAN = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/reference/command-line.md",
    "docs/explanation/deliberate-differences.md",
    "docs/lab-notes/founding-texts.md",
    "docs/reference/glossary.md",
    "docs/how-to/migrate-from-vllm.md",
    "docs/how-to/models/own-model.md",
    "docs/tutorials/first-answer.md",
)
PRIVATE = r"whoever|whomever|so many|anew|evener|oftener"
BRITISH = (
    r"behaviour\w*|favour\w*|colour\w*|licen[c]e\w*|centre|labelled|modelling"
    r"|(?:token|quant|initial|serial|optim|summar|normal|recogn|organ)is(?:e|es|ed|er|ing|ation)"
)
_WORDS = re.compile(rf"\b(?:{PRIVATE}|{BRITISH})\b", re.IGNORECASE)
_CODE = re.compile(r"^```.*?^```|`[^`]+`", re.DOTALL | re.MULTILINE)
_PATH = re.compile(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?)`")

_LISTED = re.compile(r"`((?:[a-z_0-9]+/)+[\w.-]*)(?:::(\w+))?`")
"""A path, perhaps with the name of a test in it."""
_MODULE = re.compile(
    r"python -m ((?:deploy|loadtest|planning|tools|tests|router|worker|engine|baton)(?:\.\w+)*)"
)
COMMANDS = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "Makefile", "docs/**/*.md")


def found_in(text: str) -> list[str]:
    """``line: word`` for each word that the style sheet has a better one for."""
    # Code leaves its line ends, so that line numbers stay those of the file.
    plain = _CODE.sub(lambda code: "\n" * code.group().count("\n"), text)
    return [
        f"{plain[: hit.start()].count(chr(10)) + 1}: {hit[0]}" for hit in _WORDS.finditer(plain)
    ]


@pytest.mark.parametrize("name", CLEAN)
def test_documents_use_no_private_words_and_no_british_spelling(name: str) -> None:
    found = found_in((ROOT / name).read_text())
    assert not found, f"{name}: see the style sheet in CONTRIBUTING.md: {found}"


def test_the_check_finds_words_outside_of_code_alone() -> None:
    text = "`whoever`\n```\nanew\n```\nWhoever\ntokenises, summarise; noise, promise"
    assert found_in(text) == ["5: Whoever", "6: tokenises", "6: summarise"]


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
