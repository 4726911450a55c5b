"""Which format a model speaks."""

from __future__ import annotations

from collections.abc import Callable

from baton.config.choices import ToolParserName
from router.text.chat_template import ChatTemplate
from router.tool_calls.format import ToolFormat
from router.tool_calls.formats.hermes import HERMES
from router.tool_calls.formats.llama import LLAMA3
from router.tool_calls.formats.mistral import MISTRAL, MISTRAL_ARGS
from router.tool_calls.formats.smollm import SMOLLM
from router.tool_calls.named_call_reader import ARGUMENTS

FORMATS = {form.name: form for form in (HERMES, LLAMA3, SMOLLM, MISTRAL, MISTRAL_ARGS)}


def format_for(
    name: ToolParserName, template: ChatTemplate | None, is_special: Callable[[str], bool]
) -> ToolFormat:
    """The format of this name; ``auto`` looks at the template and the vocabulary.

    Markers in the template decide; then, for a template that knows tools, Llama's special token;
    then SmolLM's name. Whoever knows nothing of tools is told of Hermes' format.
    """
    if name != "auto":
        return FORMATS[name]
    if template is None:
        return HERMES
    template = template.for_tools
    if HERMES.markers.opening in template.source:
        return HERMES
    if MISTRAL.markers.opening in template.source:
        return MISTRAL_ARGS if ARGUMENTS in template.source else MISTRAL
    if template.knows_tools and is_special(LLAMA3.markers.opening):
        return LLAMA3
    return SMOLLM if "SmolLM" in template.source else HERMES
