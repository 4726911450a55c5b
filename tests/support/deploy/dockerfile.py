"""The Dockerfile as its tests read it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def instructions() -> list[tuple[str, str]]:
    """Each instruction and what it is given, with continued lines joined."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text())
    joined = re.sub(r"\\\n\s*", "", text)
    return [
        (words[0], words[1])
        for line in joined.splitlines()
        if len(words := line.split(maxsplit=1)) == 2
    ]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, by the stage's name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, what in instructions():
        if name == "FROM":
            found[what.rpartition(" AS ")[2]] = []
        if found:
            list(found.values())[-1].append((name, what))
    return found


def last(target: str, instruction: str) -> str:
    """What counts of an instruction in an image: the last one of its stage and those below it."""
    own = stages()[target]
    found = [what for name, what in own if name == instruction]
    return found[-1] if found else last(own[0][1].partition(" AS ")[0], instruction)


def given(instruction: str) -> list[str]:
    return [what for name, what in instructions() if name == instruction]
