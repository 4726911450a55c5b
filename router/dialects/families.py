"""The formats of tool calls of the families of models. Each also reads variants that related models
write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.config.choices import ToolParserName
from router.dialects.formats import MarkedFormat, ToolFormat, mistral_id
from router.dialects.harmony import CHANNEL, MESSAGE
from router.dialects.harmony import FORMAT as HARMONY
from router.dialects.json_calls import NamedCalls, ObjectCalls
from router.dialects.parser import Markers
from router.dialects.python_calls import PythonCalls
from router.dialects.tagged_calls import TaggedCalls
from router.text.chat_template import ChatTemplate

_ELSE = "When no function helps, answer in plain words."
_REPEAT = f"For several calls repeat this. {_ELSE}"
_TAGS = "Results come within <tool_response></tool_response>. "

# Hermes 2 Pro and 3, Qwen 2.5 and 3, SmolLM3: an object within tags for each call.
#
#     <tool_call>
#     {"name": "f", "arguments": {"x": 1}}
#     </tool_call>
HERMES = MarkedFormat(
    name="hermes",
    markers=Markers("<tool_call>", "</tool_call>"),
    form=ObjectCalls(),
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    behind="\n</tool_call>",
    how_to_call=(
        "To call one, write an object with its name and its arguments within tags:\n"
        '<tool_call>\n{"name": "<name>", "arguments": {<arguments>}}\n</tool_call>\n'
        f"For several calls repeat this. {_TAGS}{_ELSE}"
    ),
)

# SmolLM2: one list of calls within tags; an empty one stands for no call.
#
#     <tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</tool_call>
SMOLLM = MarkedFormat(
    name="smollm",
    markers=HERMES.markers,
    form=ObjectCalls(),
    before="<tool_call>[",
    between=", ",
    behind="]</tool_call>",
    how_to_call=(
        "To call some, write a list of objects with name and arguments within tags:\n"
        '<tool_call>[{"name": "<name>", "arguments": {<arguments>}}]</tool_call>\n'
        f"{_TAGS}{_ELSE}"
    ),
)

# Llama 3.1 to 3.3: an answer that is a call, or calls after a special token.
#
#     {"name": "f", "parameters": {"x": 1}}
#     <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
#
# Text may come before a call without the token, too. An answer that is another JSON object is
# content. Code after the token, for the tools that these models have built in, is content too.
_OBJECTS = ('{"name"', '{"type": "function"')
LLAMA3 = MarkedFormat(
    name="llama3",
    markers=Markers("<|python_tag|>", also=_OBJECTS, separators=";", bare="{"),
    form=ObjectCalls("parameters", needs_arguments=True),
    before="",
    between="; ",
    behind="",
    how_to_call=(
        "To call one, answer with nothing but an object with its name and its parameters:\n"
        f'{{"name": "<name>", "parameters": {{<parameters>}}}}\n{_ELSE}'
    ),
)

# Llama 4: a list of calls as in Python, at the answer's start or between special tokens.
#
#     [f(x=1, y="z"), g()]
LLAMA4 = MarkedFormat(
    name="llama4",
    markers=Markers("<|python_start|>", "<|python_end|>", separators=";", bare="[{"),
    form=PythonCalls(),
    before="[",
    between=", ",
    behind="]",
    how_to_call=(
        "To call some, answer with nothing but a list of calls with keyword arguments:\n"
        f"[<name>(<argument>=<value>, <argument>=<value>), <name>()]\n{_ELSE}"
    ),
)

# Llama 4 where its chat template tells it to write objects.
LLAMA4_JSON = MarkedFormat(
    name="llama4_json",
    markers=replace(LLAMA4.markers, also=_OBJECTS),
    form=LLAMA3.form,
    reads=LLAMA4.form,
    before="",
    between=LLAMA3.between,
    behind="",
    how_to_call=LLAMA3.how_to_call,
)

# Gemma 3, whose chat template knows no tools: a list of calls as in Python, alone or in a block of
# code, where each call may also stand on a line of its own.
GEMMA = MarkedFormat(
    name="gemma",
    markers=Markers("```tool_code", "```", bare="[", repeats=True),
    form=PythonCalls(),
    before="[",
    between=", ",
    behind="]",
    how_to_call=LLAMA4.how_to_call,
    result_frame=("```tool_output\n", "\n```"),
)

# Mistral: calls after a special token. Up to tokenizer version 7 a list; from version 11 on the
# token again for each call, and two more tokens. Both formats read what the other one writes.
#
#     [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
#     [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}
_MISTRAL_CALLS = NamedCalls(middle=("[ARGS]",), id_marker="[CALL_ID]")
MISTRAL = MarkedFormat(
    name="mistral",
    markers=Markers("[TOOL_CALLS]"),
    form=ObjectCalls(),
    reads=_MISTRAL_CALLS,
    before="[TOOL_CALLS][",
    between=", ",
    behind="]",
    how_to_call=(
        "To call some, write a list of objects with name and arguments:\n"
        f'[TOOL_CALLS][{{"name": "<name>", "arguments": {{<arguments>}}}}]\n{_ELSE}'
    ),
    new_id=mistral_id,
)
MISTRAL_ARGS = MarkedFormat(
    name="mistral_args",
    markers=Markers("[TOOL_CALLS]"),
    form=_MISTRAL_CALLS,
    before="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    behind="",
    how_to_call=(
        "To call one, write its name and an object of its arguments:\n"
        f"[TOOL_CALLS]<name>[ARGS]{{<arguments>}}\n{_REPEAT}"
    ),
    new_id=mistral_id,
)

# DeepSeek V3 (0324) and R1: a name, and arguments in a block of code, between special tokens.
#
#     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f
#     ```json
#     {"x": 1}
#     ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK = Markers(
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    also=(_CALL_BEGIN,),
    behind_call=("```", _CALL_END),
)
DEEPSEEK_V3 = MarkedFormat(
    name="deepseek_v3",
    markers=_DEEPSEEK,
    form=NamedCalls(
        before_name=(_CALL_BEGIN, "function", "<｜tool▁sep｜>"),
        middle=("\n```json\n",),
        behind=("\n```", _CALL_END),
    ),
    before=_DEEPSEEK.opening,
    between="\n",
    behind=_DEEPSEEK.closing,
    how_to_call=(
        "To call one, write its name and an object of its arguments like this:\n"
        f"{_DEEPSEEK.opening}{_CALL_BEGIN}function<｜tool▁sep｜><name>\n```json\n{{<arguments>}}\n"
        f"```{_CALL_END}{_DEEPSEEK.closing}\n{_ELSE}"
    ),
)

# DeepSeek V3.1: the same tokens without the block of code.
#
#     <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜>
#     <｜tool▁calls▁end｜>
DEEPSEEK_V31 = MarkedFormat(
    name="deepseek_v31",
    markers=_DEEPSEEK,
    form=NamedCalls(before_name=(_CALL_BEGIN,), middle=("<｜tool▁sep｜>",), behind=(_CALL_END,)),
    before=_DEEPSEEK.opening,
    between="",
    behind=_DEEPSEEK.closing,
    how_to_call=(
        "To call one, write its name and an object of its arguments like this:\n"
        f"{_DEEPSEEK.opening}{_CALL_BEGIN}<name><｜tool▁sep｜>{{<arguments>}}"
        f"{_CALL_END}{_DEEPSEEK.closing}\n{_ELSE}"
    ),
)

# Kimi K2: numbered names, which are the ids of the calls, between special tokens.
#
#     <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
#     <|tool_call_argument_begin|>{"x": 1}<|tool_call_end|><|tool_calls_section_end|>
KIMI_K2 = MarkedFormat(
    name="kimi_k2",
    markers=Markers(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        also=("<|tool_call_begin|>",),
        behind_call=("<|tool_call_end|>",),
    ),
    form=NamedCalls(
        before_name=("<|tool_call_begin|>",),
        middle=("<|tool_call_argument_begin|>",),
        behind=("<|tool_call_end|>",),
        is_numbered=True,
    ),
    before="<|tool_calls_section_begin|>",
    between="",
    behind="<|tool_calls_section_end|>",
    how_to_call=(
        "To call one, write its name with a number and an object of its arguments:\n"
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.<name>:0"
        "<|tool_call_argument_begin|>{<arguments>}<|tool_call_end|><|tool_calls_section_end|>\n"
        f"{_ELSE}"
    ),
)

# Qwen 3 Coder: parameters between tags. Some answers lack the first tag.
#
#     <tool_call>
#     <function=f>
#     <parameter=x>
#     1
#     </parameter>
#     </function>
#     </tool_call>
QWEN3_CODER = MarkedFormat(
    name="qwen3_coder",
    markers=Markers("<tool_call>", "</tool_call>", also=("<function=",)),
    form=TaggedCalls(
        before_name="<function=",
        behind_name=">",
        before_key="<parameter=",
        behind_key=(">",),
        behind_value="</parameter>",
        behind="</function>",
        newlines=True,
    ),
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    behind="\n</tool_call>",
    how_to_call=(
        "To call one, write its parameters within tags:\n"
        "<tool_call>\n<function=<name>>\n<parameter=<parameter>>\n<value>\n</parameter>\n"
        f"</function>\n</tool_call>\nFor several calls repeat this. {_TAGS}{_ELSE}"
    ),
)

# GLM 4.5: keys and values between tags.
#
#     <tool_call>f
#     <arg_key>x</arg_key>
#     <arg_value>1</arg_value>
#     </tool_call>
GLM45 = MarkedFormat(
    name="glm45",
    markers=Markers("<tool_call>", "</tool_call>"),
    form=TaggedCalls(
        before_name="",
        behind_name="",
        before_key="<arg_key>",
        behind_key=("</arg_key>", "<arg_value>"),
        behind_value="</arg_value>",
        behind="</tool_call>",
    ),
    before="<tool_call>",
    between="\n<tool_call>",
    behind="",
    how_to_call=(
        "To call one, write its parameters within tags:\n"
        "<tool_call><name>\n<arg_key><parameter></arg_key>\n<arg_value><value></arg_value>\n"
        f"</tool_call>\nFor several calls repeat this. {_TAGS}{_ELSE}"
    ),
)

# MiniMax M2: parameters between tags with attributes, and one block around all calls.
#
#     <minimax:tool_call>
#     <invoke name="f">
#     <parameter name="x">1</parameter>
#     </invoke>
#     </minimax:tool_call>
MINIMAX_M2 = MarkedFormat(
    name="minimax_m2",
    markers=Markers("<minimax:tool_call>", "</minimax:tool_call>", also=("<invoke name=",)),
    form=TaggedCalls(
        before_name='<invoke name="',
        behind_name='">',
        before_key='<parameter name="',
        behind_key=('">',),
        behind_value="</parameter>",
        behind="</invoke>\n",
    ),
    before="<minimax:tool_call>\n",
    between="",
    behind="</minimax:tool_call>",
    how_to_call=(
        "To call some, write their parameters within tags:\n"
        '<minimax:tool_call>\n<invoke name="<name>">\n'
        '<parameter name="<parameter>"><value></parameter>\n</invoke>\n</minimax:tool_call>\n'
        f"For several calls repeat the part from <invoke> to </invoke>. {_ELSE}"
    ),
)

FORMATS: dict[str, ToolFormat] = {
    form.name: form
    for form in (
        *(HERMES, LLAMA3, LLAMA4, LLAMA4_JSON, SMOLLM, GEMMA, MISTRAL, MISTRAL_ARGS),
        *(DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2, QWEN3_CODER, GLM45, MINIMAX_M2, HARMONY),
    )
}

_SIGNS: tuple[tuple[ToolFormat, tuple[str, ...]], ...] = (
    (HARMONY, (CHANNEL, MESSAGE)),
    (DEEPSEEK_V3, ("<｜tool▁calls▁begin｜>", "```json")),
    (DEEPSEEK_V31, ("<｜tool▁calls▁begin｜>",)),
    (KIMI_K2, ("<|tool_calls_section_begin|>",)),
    (MINIMAX_M2, ("minimax:tool_call",)),
    (QWEN3_CODER, ("<tool_call>", "<function=")),
    (GLM45, ("<tool_call>", "<arg_key>")),
    (HERMES, ("<tool_call>",)),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
)
"""For each format of tool calls: texts in a chat template that identify it. The first match
decides."""


def format_for(
    name: ToolParserName, template: ChatTemplate | None, is_special: Callable[[str], bool]
) -> ToolFormat:
    """Return the format of tool calls with the name ``name``; ``auto`` finds it by the chat
    template and the vocabulary.

    Markers in the template decide first. Next are the special tokens of Kimi K2, and of Llama if
    the template supports tools, then the names of SmolLM and Gemma. All other models get Hermes'
    format.
    """
    if name != "auto":
        return FORMATS[name]
    return HERMES if template is None else _found(template.for_tools, is_special)


def _found(template: ChatTemplate, is_special: Callable[[str], bool]) -> ToolFormat:
    source = template.source
    for form, signs in _SIGNS:
        if all(sign in source for sign in signs):
            return form
    if is_special(KIMI_K2.markers.opening):
        # The first templates of Kimi K2 do not write calls.
        return KIMI_K2
    if template.knows_tools and is_special(LLAMA4.markers.opening):
        return LLAMA4_JSON if '"parameters"' in source else LLAMA4
    if template.knows_tools and is_special(LLAMA3.markers.opening):
        return LLAMA3
    if "<start_of_turn>" in source:
        return GEMMA
    return SMOLLM if "SmolLM" in source else HERMES
