"""The examples of the documents run against a cluster, page by page, in the order of a page.

A block marked ``sh`` or ``python`` runs. A block marked ``json`` right after it shows its output:
the output has at least these fields, of the same types.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.e2e.cluster import BATON, UpProcess

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0
_BLOCK = re.compile(
    r"^```(?P<kind>sh|python)\n(?P<text>.*?)^```\n(?:\n```json\n(?P<shown>.*?)^```$)?",
    re.DOTALL | re.MULTILINE,
)
_QUOTED = re.compile(r"^````$.*?^````$", re.DOTALL | re.MULTILINE)
"""Answers of the model, which may have blocks of their own."""
_MORE = re.compile(r",\s*…")
"""Fields that a page leaves out."""
_PROGRAMS = {"sh": ("bash", "-euo", "pipefail", "-c"), "python": (sys.executable, "-c")}
DOCS = ROOT / "docs"
_ELSEWHERE = {"reference/python-client.md"}
"""Pages whose examples another test runs."""


@dataclass(frozen=True)
class Example:
    """A block of a page."""

    kind: str
    text: str
    shown: str | None
    """What it prints, as JSON; None: the page does not say."""


def examples(page: Path) -> list[Example]:
    """The blocks of a page that run, in order."""
    text = _QUOTED.sub("", page.read_text())
    return [
        Example(one["kind"], one["text"], one["shown"] and _MORE.sub("", one["shown"]))
        for one in _BLOCK.finditer(text)
    ]


PAGES = {
    name: found
    for name, page in (
        ("README.md", ROOT / "README.md"),
        *((str(page.relative_to(DOCS)), page) for page in sorted(DOCS.rglob("*.md"))),
    )
    if name not in _ELSEWHERE and (found := examples(page))
}


def differences(shown: Any, printed: Any, path: str = "") -> list[str]:
    """Where what is printed lacks a field that is shown, or has another type. Null is any type."""
    if isinstance(shown, dict) and isinstance(printed, dict):
        return [
            difference
            for name, value in shown.items()
            for difference in (
                differences(value, printed[name], f"{path}.{name}")
                if name in printed
                else [f"{path}.{name} is missing"]
            )
        ]
    if isinstance(shown, list) and isinstance(printed, list):
        if len(printed) < len(shown):
            return [f"{path} has {len(printed)} entries, not {len(shown)}"]
        pairs = enumerate(zip(shown, printed, strict=False))
        return [one for n, pair in pairs for one in differences(*pair, f"{path}[{n}]")]
    numbers = isinstance(shown, int | float) and isinstance(printed, int | float)
    if shown is None or printed is None or numbers or type(shown) is type(printed):
        return []
    return [f"{path} is {printed!r}, and {shown!r} is shown"]


def test_there_are_examples() -> None:
    assert {
        "README.md",
        "reference/http-api.md",
        "how-to/use/batches.md",
        "how-to/use/costs.md",
        "tutorials/first-answer.md",
        "tutorials/watch-a-handoff.md",
        "how-to/operate/keys-and-tls.md",
        "how-to/use/reasoning.md",
    } <= set(PAGES)
    assert sum(map(len, PAGES.values())) >= 10


def test_differences_are_found() -> None:
    shown = {"a": [{"b": "x"}], "c": 1, "d": None}
    assert differences(shown, {"a": [{"b": "y", "e": 1}, 3], "c": 2.5, "d": "z"}) == []
    assert differences(shown, {"a": [{}], "c": "1", "d": 1}) == [
        ".a[0].b is missing",
        ".c is '1', and 1 is shown",
    ]
    assert differences(shown, {"a": [], "c": 1, "d": 1}) == [".a has 0 entries, not 1"]


@pytest.mark.parametrize("name", PAGES)
def test_the_examples_of_a_page_run(name: str, cluster: UpProcess, tmp_path: Path) -> None:
    env = {
        **os.environ,
        "PATH": f"{Path(BATON).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
    }
    for example in PAGES[name]:
        text = example.text.replace("127.0.0.1:8000", cluster.http.removeprefix("http://"))
        text = text.replace("127.0.0.1:8001", cluster.grpc)
        done = subprocess.run(
            [*_PROGRAMS[example.kind], text],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
        if example.shown is not None:
            found = differences(json.loads(example.shown), json.loads(done.stdout))
            assert not found, f"{text}\n{done.stdout}\n{found}"
