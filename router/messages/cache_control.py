"""``cache_control`` of ``/v1/messages``: which part of a prompt stays cached, and for how long.

A *breakpoint* is a block with that field: the prompt up to its end is kept. Its position among the
prompt's tokens is found by comparison with the tokens of a conversation that ends there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import InvalidRequest
from baton.request import Retention
from router.conversation.turns import Turn
from router.dialects.tools import ToolUse
from router.inference.prompt import PromptEncoder
from router.messages.blocks import message_turns, prefix_turns
from router.messages.protocol import MessagesRequest

MAX_BREAKPOINTS = 4
"""Maximum number of breakpoints in one request, as at Anthropic."""
_TTLS = {"5m": 300.0, "1h": 3600.0}
_DEFAULT_TTL = "5m"


@dataclass(frozen=True, slots=True)
class Breakpoint:
    """The end of a part of the prompt that a client wants to keep cached."""

    where: str
    """Path of the block that has the breakpoint in the body, for errors; ``the request`` for a
    breakpoint of the whole body."""
    ttl_s: float
    message: int
    """Number of the message that has the breakpoint; -1: the breakpoint is before the first
    message."""
    block: int
    """Number of the block that has the breakpoint, in its message or in the system message; -1: the
    breakpoint is before these blocks."""


def breakpoints_of(body: MessagesRequest) -> list[Breakpoint]:
    """Return the breakpoints of a body, in the order of the prompt. Raises InvalidRequest."""
    found = list(_found(body))
    if len(found) > MAX_BREAKPOINTS:
        where = found[MAX_BREAKPOINTS].where
        raise InvalidRequest(
            f"{where}: at most {MAX_BREAKPOINTS} blocks may have cache_control", param=where
        )
    for earlier, later in itertools.pairwise(found):
        if later.ttl_s > earlier.ttl_s:
            raise InvalidRequest(
                f"{later.where}: a longer ttl must not come after a shorter one", param=later.where
            )
    return found


def _found(body: MessagesRequest) -> Iterator[Breakpoint]:
    for place, tool in enumerate(body.tools or ()):
        yield from _marked(tool, f"tools[{place}]", -1, -1)
    if not isinstance(body.system, str):
        for place, block in enumerate(body.system or ()):
            yield from _marked(block, f"system[{place}]", -1, place)
    for number, message in enumerate(body.messages):
        if isinstance(message.content, list):
            for place, block in enumerate(message.content):
                where = f"messages[{number}].content[{place}]"
                yield from _marked(block, where, number, place)
    last = _last_block(body)
    whole = {"cache_control": body.cache_control}
    yield from _marked(whole, "", len(body.messages) - 1, last)


def _marked(block: Mapping[str, Any], where: str, message: int, place: int) -> Iterator[Breakpoint]:
    control, param = block.get("cache_control"), f"{where}.cache_control".removeprefix(".")
    if control is None:
        return
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise InvalidRequest(f'{param} must be an object with "type": "ephemeral"', param=param)
    ttl = control.get("ttl") or _DEFAULT_TTL
    if not isinstance(ttl, str) or ttl not in _TTLS:
        raise InvalidRequest(f"{param}.ttl must be {' or '.join(_TTLS)}", param=f"{param}.ttl")
    yield Breakpoint(where or "the request", _TTLS[ttl], message, place)


async def retentions_of(
    body: MessagesRequest,
    prompt_ids: Sequence[int],
    encoder: PromptEncoder,
    tenant: str,
    tools: ToolUse | None,
    variables: Mapping[str, Any],
) -> tuple[Retention, ...]:
    """Return the retentions that a body requests for its prompt. ``prompt_ids`` are the tokens of
    the prompt.

    ``variables`` are those with which the chat template renders the prompt. Raises InvalidRequest,
    Overloaded.
    """
    # Everything before a breakpoint is kept, too. So for each time to live, only the last one
    # counts.
    last = {one.ttl_s: one for one in breakpoints_of(body)}
    found = []
    for one in last.values():
        tokens = len(prompt_ids)
        if not _is_end(body, one):
            turns = _turns_before(body, one)
            prefix = await encoder.chat_ids(
                tenant, turns, tools, ending="closed", variables=variables
            )
            tokens = _common(prompt_ids, prefix)
        found.append(Retention(tokens, one.ttl_s))
    return tuple(found)


def _is_end(body: MessagesRequest, one: Breakpoint) -> bool:
    return one.message == len(body.messages) - 1 and one.block == _last_block(body)


def _last_block(body: MessagesRequest) -> int:
    """Return the place of the last block of the last message; 0 if that is text."""
    content = body.messages[-1].content if body.messages else ""
    return len(content) - 1 if isinstance(content, list) else 0


def _turns_before(body: MessagesRequest, one: Breakpoint) -> list[Turn]:
    """Return a conversation that ends at a breakpoint, or that differs from the body's conversation
    only after the breakpoint."""
    if one.message >= 0:
        return prefix_turns(body, one.message, one.block)
    # Many templates require a user message.
    begin: list[Turn] = [{"role": "user", "content": ""}]
    if one.block >= 0:
        system = body.model_copy(update={"system": (body.system or [])[: one.block + 1]})
        return [*prefix_turns(system, -1), *begin]
    first = message_turns(body)[0]
    return [first, *begin] if first["role"] == "system" else begin


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of leading tokens that two prompts have in common."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def written_by_ttl(
    retentions: Sequence[Retention], cached_tokens: int, written_tokens: int
) -> dict[str, int]:
    """Return how many tokens of a prompt were written to the cache, by ``ttl``. The written tokens
    follow the ``cached_tokens`` that were read from the cache."""
    end = cached_tokens + written_tokens
    long_s = _TTLS["1h"]
    longest = max((one.tokens for one in retentions if one.ttl_s >= long_s), default=0)
    long = max(0, min(end, longest) - cached_tokens)
    return {
        "ephemeral_5m_input_tokens": written_tokens - long,
        "ephemeral_1h_input_tokens": long,
    }
