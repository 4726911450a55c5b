"""Finds out which conversations a chat template takes, by rendering a few at the start.

Templates refuse what their model was not trained on (a system message, two turns of one role), or
leave it out without a word. ``router.conversation.fit`` writes conversations so that each says all
that the client's history does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton.errors import InvalidRequest
from router.conversation.turns import Turn, calls_turn, result_turn, text_turn
from router.text.chat_template import ChatTemplate

_LIMIT = 1 << 20
_A, _B, _C, _D = "qvzalfa", "qvzbeta", "qvzgama", "qvzdelt"
"""Words that no template has: where one is missing in the text, its message is lost."""
_ROLE = "qvzrole"
_LONG_IDS, _SHORT_IDS = ("call_qvz001", "call_qvz002"), ("qvzaaaaa1", "qvzaaaaa2")
_OBJECT: Mapping[str, Any] = {_C: _D}
_BROKEN = '{"' + _C
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _B,
        "description": _B,
        "parameters": {"type": "object", "properties": {_C: {"type": "string"}}},
    },
}


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """What a chat template takes. The defaults are those of a template that takes everything."""

    takes_system: bool = True
    takes_late_system: bool = True
    """Whether system messages may stand after others, or follow one another."""
    takes_repeats: bool = True
    """Whether two messages of the same role may follow one another."""
    takes_answer_first: bool = True
    """Whether a conversation may begin with the assistant's message."""
    takes_other_roles: bool = False
    """Whether it writes the name of any role."""
    takes_several_calls: bool = True
    """Whether a message may have several tool calls."""
    takes_object_arguments: bool = True
    """Whether the arguments of calls are an object; else they are JSON text."""
    takes_text_arguments: bool = True
    """Whether the arguments of calls may be text, too, which need not be JSON."""
    takes_long_ids: bool = True
    """Whether ids of calls may be of any form; else they have nine letters and digits."""
    takes_empty_calls: bool = True
    """Whether the content next to calls may be an empty text; else it is null."""
    takes_text: bool = True
    """Whether content is text; else it is a list of parts."""


async def form_of(template: ChatTemplate) -> TemplateForm:
    """Find out what a template takes. One that renders nothing of what is tried has the default.

    Raises what ``ChatTemplate.render`` raises, except for InvalidRequest.
    """
    probe = _Probe(template)
    found = await _of_texts(probe)
    return await _with_calls(probe, found) if template.knows_calls else found


async def _of_texts(probe: _Probe) -> TemplateForm:
    """Return what the template takes of conversations without calls."""
    if not await probe.shows([text_turn("user", _A)], _A):
        probe.as_parts = True
        if not await probe.shows([text_turn("user", _A)], _A):
            probe.as_parts = False
            return TemplateForm()
    user, answer, last = text_turn("user", _A), text_turn("assistant", _B), text_turn("user", _D)
    system = text_turn("system", _C)
    takes_system = await probe.shows([system, user], _C, _A)
    return TemplateForm(
        takes_system=takes_system,
        takes_late_system=takes_system
        and await probe.shows([user, answer, system, last], _A, _B, _C, _D)
        and await probe.shows([system, text_turn("system", _B), user], _C, _B, _A),
        takes_repeats=await probe.shows([user, text_turn("user", _B)], _A, _B)
        and await probe.shows([user, answer, text_turn("assistant", _C), last], _A, _B, _C, _D),
        takes_answer_first=await probe.shows([answer, user], _B, _A),
        takes_other_roles=await probe.shows([text_turn(_ROLE, _A), last], _ROLE, _A, _D),
        takes_text=not probe.as_parts,
    )


async def _with_calls(probe: _Probe, form: TemplateForm) -> TemplateForm:
    """Return the form with what the template takes of calls."""
    for ids in (_LONG_IDS, _SHORT_IDS):
        for empty in (True, False):
            takes_object = await probe.writes_object(ids, empty=empty)
            if not takes_object and not await probe.calls(ids, ['{"' + _C + '": 1}'], _C):
                continue
            arguments: Any = _OBJECT if takes_object else '{"' + _C + '": 1}'
            return replace(
                form,
                takes_long_ids=ids is _LONG_IDS,
                takes_empty_calls=empty,
                takes_object_arguments=takes_object,
                takes_text_arguments=await probe.calls(ids, [_BROKEN], _C, empty=empty),
                takes_several_calls=await probe.calls(ids, [arguments] * 2, _C, empty=empty),
            )
    return form


class _Probe:
    """Renders conversations with one template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._tools = [_TOOL] if template.knows_tools else None
        self.as_parts = False
        """Whether content is written as a list of parts."""

    async def shows(self, turns: Sequence[Turn], *words: str) -> bool:
        """Whether the template renders the turns, with these words in this order."""
        text = await self._rendered([self._written(turn) for turn in turns])
        at = 0
        for word in words:
            at = text.find(word, at)
            if at < 0:
                return False
        return True

    async def writes_object(self, ids: Sequence[str], *, empty: bool) -> bool:
        """Whether the template writes the arguments of a call as JSON, or one by one, if they are
        an object."""
        text = await self._rendered(self._talk(ids, [_OBJECT], empty=empty))
        # Python's own form of an object is no JSON: such a template expects text.
        return _C in text and _D in text and f"'{_C}'" not in text

    async def calls(
        self, ids: Sequence[str], arguments: Sequence[Any], *words: str, empty: bool = True
    ) -> bool:
        """Whether the template renders a message with a call for each of ``arguments``, and shows
        these words."""
        text = await self._rendered(self._talk(ids, arguments, empty=empty))
        return all(text.count(word) >= len(arguments) for word in words)

    def _talk(self, ids: Sequence[str], arguments: Sequence[Any], *, empty: bool) -> list[Turn]:
        calls = calls_turn(
            "", [(one, _B, given) for one, given in zip(ids, arguments, strict=False)]
        )
        if not empty:
            calls = {**calls, "content": None}
        results = [self._result(one) for one, _ in zip(ids, arguments, strict=False)]
        return [self._written(text_turn("user", _A)), calls, *results]

    def _result(self, call_id: str) -> Turn:
        if self._template.knows_results:
            return self._written(result_turn(call_id, _A))
        return self._written(text_turn("user", _A))

    def _written(self, turn: Turn) -> Turn:
        return as_parts(turn) if self.as_parts else turn

    async def _rendered(self, turns: Sequence[Turn]) -> str:
        tools = self._tools if any("tool_calls" in turn for turn in turns) else None
        try:
            return await asyncio.wrap_future(self._template.render(turns, _LIMIT, tools))
        except InvalidRequest:
            return ""


def as_parts(turn: Turn) -> Turn:
    """Return a message whose text is a list with one part."""
    content = turn["content"]
    if not isinstance(content, str):
        return turn
    return {**turn, "content": [{"type": "text", "text": content}]}
