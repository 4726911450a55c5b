"""The prose linter: `python -m tools.prose [PATH ...]` lists what CONTRIBUTING.md's style refuses.

It reads Markdown pages, and docstrings, comments, messages and test names of Python modules. Text
in backticks and code blocks is code. It has a list of words and three rules:

- A docstring's first paragraph is whole sentences: it ends with a period, or leads to a list.
- A docstring says more than the name of what it describes.
- A sentence has at most ``MAX_WORDS`` words.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_WORDS = 40

WORDS: dict[str, str] = {
    r"whoever|whomever|somebody|nobody|everybody|anybody": "name the process, client or user",
    r"whom": "a second sentence; software is 'it'",
    r"who (?:stands|waits|comes|holds|dies|asks|has|is|goes|sends)": "software is 'it'",
    r"(?:is|are|was|were|be|been|being) told": "receives, reports, sends",
    r"(?:so|that) many": "n, a number",
    r"anew|evener|oftener": "again, more even, more often",
    r"beside": "next to, during, while",
    r"but for": "except",
    r"of which|of whom": "a second sentence",
    r"(?:stand|stands|stood) by": "warm standby",
    r"turned away": "rejected",
    r"(?:break|breaks|broke|broken) off": "fails, disconnects",
    r"under way": "in flight, running",
    r"(?:mend|mends|mended|mending)": "fix",
    r"(?:say|says|said) so": "report it, confirm it",
    r"(?:served|works|work|worked) as meant": "works as designed",
    r"nought|whence|thereof|thereby|wherein|hence": "plain words",
    r"behaviours?|favou?rites?|colours?|coloured|centres?|licences?": "US spelling",
    r"labelled|modelling|modelled|cancelling|travelling|artefacts?|grey": "US spelling",
    r"(?:token|quant|initial|serial|optim|summar|normal|recogn|organ|minim|maxim|util|synchron|"
    r"author|categor|priorit|real|general|special)is(?:e|es|ed|er|ers|ing|ation|ations)": "US",
}
"""Regular expressions of words to avoid, each with advice on what to write instead."""

PRODUCT = (
    *("baton", "decode_worker", "deploy", "engine", "kvtransfer", "loadtest", "planning"),
    *("prefill_worker", "router", "tools", "worker"),
)
GENERATED = re.compile(r"baton/v1/|_pb2")
QUOTES = ("tools/prose.py", "tests/unit/tools/test_prose.py", "CONTRIBUTING.md")
"""Files that quote words to avoid as examples. Their words are not checked."""

_WORD = re.compile(rf"\b(?:{'|'.join(WORDS)})\b", re.IGNORECASE)
_FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1$", re.DOTALL | re.MULTILINE)
_CODE = re.compile(r"``[^`]+``|`[^`\n]+(?:\n[^`\n]+)?`")
_LINK = re.compile(r"\]\([^)]*\)|<https?:[^>]*>|https?://\S+")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n|\n\s*(?=[-*|#>]|\d+\.)|\s+[–—]\s+|\s*\|\s*")
_ENDS_WELL = re.compile(r"[.!?:)`\"'…>]$|::$")
_NAME_WORD = re.compile(r"[A-Za-z][a-z]*|[A-Z]+(?![a-z])")
_FILLER = frozenset(
    ["a", "an", "and", "for", "in", "is", "it", "its", "of", "on", "or", "that", "the", "to"]
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A line of a file that breaks a rule of style, and what to write instead."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def check(path: str, source: str) -> list[Finding]:
    """Return all findings of a file: a Markdown page or a Python module, by the path's suffix."""
    if path.endswith(".py"):
        found = list(_check_python(path, source))
    else:
        plain = _FENCE.sub(_blank, source)
        found = [*_words(path, 1, plain), *_sentences(path, 1, plain)]
    return sorted(found, key=lambda one: one.line)


def _blank(code: re.Match[str]) -> str:
    """Return a neutral word to replace a piece of code, so that code is not checked as prose.

    Line ends stay, so that line numbers do not change.
    """
    return "x" + "\n" * code.group().count("\n")


def _words(path: str, line: int, text: str) -> Iterator[Finding]:
    if path in QUOTES:
        return
    plain = _LINK.sub(lambda link: "\n" * link.group().count("\n"), _CODE.sub(_blank, text))
    for hit in _WORD.finditer(plain):
        better = next(
            better for word, better in WORDS.items() if re.fullmatch(word, hit[0], re.IGNORECASE)
        )
        at = line + plain[: hit.start()].count("\n")
        yield Finding(path, at, f"avoid '{' '.join(hit[0].split())}': {better}")


def _sentences(path: str, line: int, text: str) -> Iterator[Finding]:
    plain = _LINK.sub(lambda link: "\n" * link.group().count("\n"), _CODE.sub(_blank, text))
    start = 0
    for end in [*(hit.start() for hit in _SENTENCE_END.finditer(plain)), len(plain)]:
        sentence = plain[start:end]
        words = len(re.findall(r"[\w'’-]*[A-Za-z][\w'’-]*", sentence))
        if words > MAX_WORDS:
            lead = len(sentence) - len(sentence.lstrip(" \n|.:;!?–—"))
            at = line + plain[: start + lead].count("\n")
            yield Finding(path, at, f"a sentence of {words} words; at most {MAX_WORDS}")
        start = end


def _check_python(path: str, source: str) -> Iterator[Finding]:
    tree = ast.parse(source)
    docstrings = dict(_docstrings(tree))
    for line, (name, text) in docstrings.items():
        yield from _words(path, line, text)
        yield from _sentences(path, line, text)
        yield from _shape(path, line, name, text)
    in_tests = path.startswith("tests/")
    comment, first = "", 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            first = first or token.start[0]
            comment += token.string.lstrip("#!:").strip() + "\n"
        elif token.type != tokenize.NL and comment:
            yield from _words(path, first, comment)
            comment, first = "", 0
        # A test's texts are its data. Expressions and SQL are not prose.
        prose = token.type == tokenize.STRING and " " in token.string
        if prose and not in_tests and token.start[0] not in docstrings:
            yield from _words(path, token.start[0], token.string)
    if in_tests:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    yield from _words(path, node.lineno, name.replace("_", " "))


def _docstrings(tree: ast.Module) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield each docstring: its line number, and the name and text. Docstrings of fields and
    constants are included."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        name = getattr(node, "name", "")
        for before, statement in zip([None, *body], body, strict=False):
            if not (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                continue
            described = name if before is None else _assigned(before)
            text = statement.value.value
            yield statement.lineno, (described, text)


def _assigned(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return ""


def _shape(path: str, line: int, name: str, text: str) -> Iterator[Finding]:
    paragraph = text.strip().partition("\n\n")[0].rstrip()
    if paragraph and not _ENDS_WELL.search(paragraph):
        yield Finding(path, line, "a docstring's first paragraph is whole sentences")
    said = {_stem(word) for word in re.findall(r"[a-z]+", text.lower()) if word not in _FILLER}
    named = {_stem(word.lower()) for word in _NAME_WORD.findall(name)}
    if said and said <= named:
        yield Finding(path, line, f"the docstring repeats the name '{name}': delete it")


def _stem(word: str) -> str:
    return re.sub(r"(?:ing|ed|es|s|e)$", "", word)


def files(paths: list[str]) -> list[str]:
    """Return the files of Git's index to check: all, or those under ``paths``."""
    listed = subprocess.run(  # noqa: S603 - Git's list of files
        [shutil.which("git") or "git", "ls-files", "--", *(paths or ["*.md", *PRODUCT, "tests"])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [one for one in listed if one.endswith((".py", ".md")) and not GENERATED.search(one)]


def main() -> int:
    """Print the findings. Returns 0 if there are none."""
    parser = argparse.ArgumentParser(prog="python -m tools.prose", description=__doc__)
    parser.add_argument("paths", nargs="*", help="Files and folders; all by default.")
    names = files(parser.parse_args().paths)
    found = [one for name in names for one in check(name, (ROOT / name).read_text())]
    sys.stdout.writelines(f"{one}\n" for one in found)
    sys.stderr.write(f"{len(found)} findings in {len(names)} files\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
