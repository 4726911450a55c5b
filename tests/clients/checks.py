"""What the scripts in this folder share. They run in environments of their own: no Baton in here.

Each check prints a line of JSON: its name, whether it passed, and why not. What the server refuses
as ``unsupported_parameter`` is ``missing``: the server reports it, and a later one may have it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence

URL = os.environ.get("BATON_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("BATON_MODEL", "smollm2-135m-instruct")
MODEL_PATH = os.environ.get("BATON_MODEL_PATH", "")
"""The model's folder, for clients that count tokens."""
HELLO = [{"role": "user", "content": "Name three colours of the rainbow."}]
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "maxLength": 20}},
    "required": ["colour"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "colour", "strict": True, "schema": SCHEMA},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint the wall in a colour.",
            "parameters": SCHEMA,
        },
    }
]
DEADLINE_S = 120.0
MAX_WORKERS = 8
"""Of the cluster under test."""
_MISSING = ("unsupported_parameter", "is not supported with this value")
_MAX_WORDS = 300


def is_read_again(cached_tokens: Callable[[], int]) -> bool:
    """Whether a prompt of over 100 tokens, sent again, is read from a cache.

    Not always the second time: each worker has a cache of its own, and a worker without the prompt
    may be predicted to be faster. After that it has the prompt as well.
    """
    return any(cached_tokens() > 100 for _ in range(1 + MAX_WORKERS))


def run(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run all checks, whatever becomes of each."""
    for name, check in checks.items():
        try:
            check()
            outcome, why = "pass", ""
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            outcome = "missing" if _is_missing(why) else "fail"
            traceback.print_exc()
        line = {"check": name, "outcome": outcome, "why": why[:_MAX_WORDS]}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def same(actual: object, expected: object) -> None:
    """Raises AssertionError that shows both."""
    if actual != expected:
        raise AssertionError(f"{actual!r} is not {expected!r}")


def command(arguments: Sequence[str], **variables: str) -> str:
    """What a command prints. Raises AssertionError with the end of that where it fails."""
    done = subprocess.run(
        arguments,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=4 * DEADLINE_S,
        check=False,
    )
    sys.stderr.write(done.stdout)
    if done.returncode:
        lines = [
            line for line in done.stdout.splitlines() if any(sign in line for sign in _MISSING)
        ]
        why = lines[-1] if lines else done.stdout[-_MAX_WORDS:]
        raise AssertionError(f"exit code {done.returncode}: {why}")
    return done.stdout


def _is_missing(text: str) -> bool:
    return any(sign in text for sign in _MISSING)
