"""Makes prompts for measuring speculation: questions from files, and copying of Baton's own text.

A file has rows of ``category`` and ``turns``, like those of Spec-Bench and MT-bench; the first turn
counts.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from baton.errors import ConfigError

COPY = "copy"
"""Category name of the copying tasks."""
_MT_BENCH = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}
"""Categories of MT-bench, which Spec-Bench counts as one."""
_ROOT = Path(__file__).parents[2]
_ROOMS = ("engine", "router", "kvtransfer", "baton")
_SHORTEST, _LONGEST = 400, 1200
"""Minimum and maximum length of a passage or function to copy, in characters."""


def read_questions(folder: Path) -> dict[str, list[str]]:
    """Return the questions of all ``.jsonl`` files of a folder, by category, in the files' order.

    Raises ConfigError if there are none, or a file cannot be read.
    """
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        try:
            rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
            for row in rows:
                category = "mt_bench" if row["category"] in _MT_BENCH else str(row["category"])
                found.setdefault(category, []).append(str(row["turns"][0]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"{folder} has no .jsonl file with questions")
    return found


def copying_tasks() -> list[str]:
    """Return prompts that ask the model to quote a passage or to edit code. The passages and the
    code are from Baton's documentation and sources."""
    passages, functions = _passages(), _functions()
    tasks = []
    for passage, function in zip(passages, functions, strict=False):
        tasks.append(
            f"Repeat the following passage word for word, and write nothing else.\n\n{passage}"
        )
        tasks.append(
            "Rewrite this Python function with its docstring changed to 'Internal.', and leave"
            f" everything else as it is. Answer with the code alone.\n\n```python\n{function}\n```"
        )
    if not tasks:
        raise ConfigError(f"{_ROOT} has no sources for copying tasks")
    return tasks


def _passages() -> Iterator[str]:
    """Yield paragraphs of the documentation. If it is not installed, yield docstrings of
    modules."""
    pages = sorted((_ROOT / "docs").rglob("*.md"))
    for page in pages:
        for part in page.read_text("utf-8").split("\n\n"):
            if _SHORTEST <= len(part) <= _LONGEST and part[0].isalpha():
                yield part
    if not pages:
        for module in _modules():
            text = ast.get_docstring(module) or ""
            if len(text) >= _SHORTEST:
                yield text


def _functions() -> Iterator[str]:
    for module in _modules():
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                text = ast.unparse(node)
                if _SHORTEST <= len(text) <= _LONGEST:
                    yield text


def _modules() -> Iterator[ast.Module]:
    for room in _ROOMS:
        for path in sorted((_ROOT / room).glob("*.py")):
            yield ast.parse(path.read_text("utf-8"))
