"""Types of fields that bodies of several APIs share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field


def _integral(value: Any) -> Any:
    """JSON knows one kind of number: 16.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
# Some clients of completions send false where they want none.
Count = Annotated[
    int | None,
    BeforeValidator(
        lambda v: None if v is False else _integral(v),
        json_schema_input_type=int | Literal[False] | None,
    ),
]
# Lists stop at the first bad item: a body of a million bad ones would be a million error objects.
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[Int], Field(fail_fast=True)]
