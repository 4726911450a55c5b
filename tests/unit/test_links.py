"""Links of documents outside the site lead somewhere, and readers find answers by them.

The site's build checks links between the pages in docs/.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_CLICKS = 3
_CODE = re.compile(r"^(`{3,}).*?^\1|(`+)[^`]+?\2", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^()\s]+)\)")
_EXTERNAL = re.compile(r"[a-z]+:")
_MENTION = re.compile(r"\bdocs/[\w/.-]+\.md(?:#[\w.-]+)?")
_PLACE = re.compile(r'<a id="([^"]+)"></a>')


def tracked(*patterns: str) -> list[str]:
    """Paths of Git's index that match."""
    listed = subprocess.run(
        ["git", "ls-files", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return listed.stdout.splitlines()


def outside_of_the_site() -> list[str]:
    documents = [path for path in tracked("*.md") if not path.startswith("docs/")]
    return [*documents, *tracked("*NOTES.txt")]


def links_of(path: str) -> Iterator[str]:
    """Targets of a page's links, as paths from the root, with their anchors."""
    page = _CODE.sub("", (ROOT / path).read_text())
    for target in _LINK.findall(page):
        if not _EXTERNAL.match(target):
            file, hash_sign, anchor = target.partition("#")
            whole = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
            yield f"{whole if file else path}{hash_sign}{anchor}"


def anchors_of(path: str) -> dict[str, str]:
    """By anchor: the line of a table, or the section, to which it leads."""
    found: dict[str, str] = {}
    page = (ROOT / path).read_text()
    for line in page.splitlines():
        found |= dict.fromkeys(_PLACE.findall(line), line)
    seen: Counter[str] = Counter()
    parts = re.split(r"^(#+ .*)$", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M), flags=re.M)
    for heading, section in zip(parts[1::2], parts[2::2], strict=True):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lstrip("# ")).lower()
        name = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found[f"{name}-{seen[name]}" if seen[name] else name] = section
        seen[name] += 1
    return found


def problem_of(target: str) -> str:
    """What is wrong with a link; empty if it leads somewhere."""
    path, _, anchor = target.partition("#")
    if not (ROOT / path).exists():
        return f"{target}: there is no such file"
    if anchor and anchor not in anchors_of(path):
        return f"{target}: there is no such heading or anchor"
    return ""


@pytest.mark.parametrize("path", outside_of_the_site())
def test_links_outside_of_the_site_lead_somewhere(path: str) -> None:
    assert [problem for one in links_of(path) if (problem := problem_of(one))] == []


def test_pages_that_files_mention_exist() -> None:
    """Help, comments and other files name pages by their paths."""
    wrong = []
    for path in tracked("*.py", "*.md", "*.yaml", "*.toml", "*.proto", "*.txt", "Makefile"):
        # The changelog is about pages of its day; tests have made-up ones.
        if path == "CHANGELOG.md" or path.startswith(("tests/", "docs/lab-notes/")):
            continue
        mentions = _MENTION.findall((ROOT / path).read_text())
        wrong += [f"{path}: {found}" for one in mentions if (found := problem_of(one))]
    assert wrong == []


def paths_of_readers() -> list[tuple[str, list[str], str]]:
    """Questions of CONTRIBUTING.md's table, with the steps and the words of the answer."""
    page = (ROOT / "CONTRIBUTING.md").read_text().split("## Reader's test\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("|")][2:]
    return [
        (question.strip(), re.findall("`([^`]+)`", path), answer.strip())
        for question, path, answer in rows
    ]


def test_there_are_three_questions_of_readers() -> None:
    assert len(paths_of_readers()) == 3


@pytest.mark.parametrize(("question", "steps", "answer"), paths_of_readers())
def test_a_reader_finds_the_answer_in_three_clicks(
    question: str, steps: list[str], answer: str
) -> None:
    first, *others = steps
    assert first == "README.md"
    assert len(others) <= MAX_CLICKS
    for before, after in zip(steps, others, strict=False):
        assert after in links_of(before.partition("#")[0]), f"{question} {before} has no {after}"
    path, _, anchor = steps[-1].partition("#")
    text = anchors_of(path)[anchor] if anchor else (ROOT / path).read_text()
    assert answer in " ".join(text.split()), f"{question} {steps[-1]} does not have the answer"
