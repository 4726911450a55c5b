"""Labels: the agent and the run that a client names for a request, for bills and the log.

HTTP clients name them in ``metadata``, ``{"agent": "researcher", "run_id": "r-17"}``, or in
headers. gRPC clients use metadata with the headers' names. Other entries of ``metadata`` are
ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.client.headers import AGENT_HEADER, RUN_HEADER
from baton.errors import InvalidRequest

MAX_AGENT_CHARACTERS = 64
MAX_RUN_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Labels:
    """The names of the agent and the run that a request belongs to; empty if the client gave
    none."""

    agent: str = ""
    run_id: str = ""

    @classmethod
    def of_headers(cls, headers: Mapping[str, str]) -> Labels:
        """Read the labels from headers with names in lower case. Raises InvalidRequest."""
        return cls(
            _checked(headers.get(AGENT_HEADER, ""), AGENT_HEADER, MAX_AGENT_CHARACTERS),
            _checked(headers.get(RUN_HEADER, ""), RUN_HEADER, MAX_RUN_CHARACTERS),
        )

    def or_of_body(self, body: Mapping[str, Any]) -> Labels:
        """Return the labels in the ``metadata`` of a request body. If the body lacks a label, this
        object's label is used. Raises InvalidRequest."""
        given = body.get("metadata")
        if given is None:
            return self
        if not isinstance(given, Mapping):
            raise InvalidRequest("metadata must be an object", param="metadata")
        agent, run_id = given.get("agent"), given.get("run_id")
        if agent is None and run_id is None:
            return self
        return Labels(
            _checked(agent or self.agent, "metadata.agent", MAX_AGENT_CHARACTERS),
            _checked(run_id or self.run_id, "metadata.run_id", MAX_RUN_CHARACTERS),
        )


NO_LABELS = Labels()


def _checked(value: Any, param: str, most: int) -> str:
    # Printable text has no control characters, which could forge lines of a log.
    if not isinstance(value, str) or len(value) > most or not value.isprintable():
        raise InvalidRequest(
            f"{param} must be a string of at most {most} printable characters", param=param
        )
    if value.startswith("("):
        raise InvalidRequest(f"{param} must not begin with a parenthesis", param=param)
    return value
