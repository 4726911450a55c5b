"""Hooks of schemathesis, in its process: bodies that are served, and a count of what was answered.

What it makes of the description alone is refused nearly always: no model has a random name.
"""

from __future__ import annotations

import atexit
import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis

from tests.fuzz.bodies import BODIES, plausible_body

MODEL_VARIABLE, ANSWERS_VARIABLE = "BATON_FUZZ_MODEL", "BATON_FUZZ_ANSWERS"
"""Environment variables: the served model's id, and the file that gets the counts."""
_PLAUSIBLE = 0.75
"""The share of the valid bodies that are replaced."""
_model = os.environ.get(MODEL_VARIABLE, "")
_answers: Counter[tuple[str, str, int]] = Counter()


def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Name the served model, and replace most bodies that are meant to be valid."""
    path, body = case.operation.path, case.body
    if path not in BODIES or not isinstance(body, dict):
        return
    dice = random.Random(json.dumps(body, sort_keys=True, default=str))
    is_valid = case.meta is None or case.meta.generation.mode.is_positive
    if is_valid and dice.random() < _PLAUSIBLE:
        case.body = plausible_body(dice, path, _model)
    elif isinstance(body.get("model"), str):
        case.body = {**body, "model": _model}


def after_call(context: Any, case: Any, response: Any) -> None:
    """Count an answer."""
    _answers[case.operation.method.upper(), case.operation.path, response.status_code] += 1


def _write_answers() -> None:
    told: dict[str, dict[str, int]] = {}
    for (method, path, status), count in sorted(_answers.items()):
        told.setdefault(f"{method} {path}", {})[str(status)] = count
    Path(os.environ[ANSWERS_VARIABLE]).write_text(json.dumps(told, indent=1))


if ANSWERS_VARIABLE in os.environ:
    schemathesis.hook(before_call)
    schemathesis.hook(after_call)
    atexit.register(_write_answers)
