"""Hooks of schemathesis, in its process: bodies that are served, files, and a count of the answers.

A body that it makes from the description alone is nearly always refused: no model has a random
name. Its own uploads are empty.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import httpx
import schemathesis

from tests.fuzz.bodies import BODIES, batch_file, plausible_body

MODEL_VARIABLE, ANSWERS_VARIABLE = "BATON_FUZZ_MODEL", "BATON_FUZZ_ANSWERS"
URL_VARIABLE, KEY_VARIABLE = "BATON_FUZZ_URL", "BATON_FUZZ_KEY"
"""Environment variables: the model's id, the file that gets the counts, the server, a key."""
_FILES = "/v1/files"
_UPLOAD_S = 60
_PLAUSIBLE = 0.75
"""The share of the valid bodies that are replaced."""
_model = os.environ.get(MODEL_VARIABLE, "")
_OK = 200
_SOURCES = {
    "/v1/feedback": ("id", "/v1/chat/completions"),
    "/v1/batches": ("input_file_id", _FILES),
}
"""Fields with ids, and the paths that make them."""
_ids: dict[str, deque[str]] = {path: deque(maxlen=16) for _, path in _SOURCES.values()}
_answers: Counter[tuple[str, str, int]] = Counter()


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Name the served model, and replace most bodies that are meant to be valid."""
    path, body = case.operation.path, case.body
    if path == _FILES and case.operation.method.upper() == "POST":
        _upload(random.Random(len(_answers) + _answers.total()))
    if path not in BODIES or not isinstance(body, dict):
        return
    dice = random.Random(json.dumps(body, sort_keys=True, default=str))
    is_valid = case.meta is None or case.meta.generation.mode.is_positive
    if is_valid and dice.random() < _PLAUSIBLE:
        case.body = plausible_body(dice, path, _model) | _made_before(dice, path)
    elif isinstance(body.get("model"), str):
        case.body = {**body, "model": _model}


def _upload(dice: random.Random) -> None:
    """Upload a file of batch lines, besides the upload of the case."""
    answer = httpx.post(
        os.environ[URL_VARIABLE] + _FILES,
        data={"purpose": "batch"},
        files={"file": ("lines.jsonl", batch_file(dice, _model))},
        headers={"authorization": f"Bearer {os.environ[KEY_VARIABLE]}"},
        timeout=_UPLOAD_S,
        trust_env=False,
    )
    _count("POST", _FILES, answer.status_code, answer)


def _made_before(dice: random.Random, path: str) -> dict[str, str]:
    """Ids of answers and files, for bodies that name some."""
    source = _SOURCES.get(path)
    if source is None or not _ids[source[1]]:
        return {}
    return {source[0]: dice.choice(_ids[source[1]])}


def after_call(context: Any, case: Any, response: Any) -> None:
    """Count an answer."""
    _count(case.operation.method.upper(), case.operation.path, response.status_code, response)


def _count(method: str, path: str, status: int, response: Any) -> None:
    _answers[method, path, status] += 1
    if method == "POST" and path in _ids and status == _OK:
        with contextlib.suppress(ValueError, KeyError):
            _ids[path].append(response.json()["id"])


def _write_answers() -> None:
    told: dict[str, dict[str, int]] = {}
    for (method, path, status), count in sorted(_answers.items()):
        told.setdefault(f"{method} {path}", {})[str(status)] = count
    Path(os.environ[ANSWERS_VARIABLE]).write_text(json.dumps(told, indent=1))


if ANSWERS_VARIABLE in os.environ:
    schemathesis.hook(before_call)
    schemathesis.hook(after_call)
    atexit.register(_write_answers)
