"""OpenAI's schemas, which validate answers where they are next to the repository."""

from __future__ import annotations

import jsonschema
import pytest

from tests.support.router.front_fakes import SCHEMA_FILE, SCHEMAS, check_schema


def test_an_answer_of_another_shape_is_noticed() -> None:
    if not SCHEMA_FILE.is_file():
        pytest.skip(f"the OpenAI schemas are not at {SCHEMAS}: no answer is validated by them")
    with pytest.raises(jsonschema.ValidationError):
        check_schema({"object": "chat.completion"}, "CreateChatCompletionResponse")
