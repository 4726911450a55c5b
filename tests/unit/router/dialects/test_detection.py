"""``auto`` finds the dialects of published chat templates.

Each excerpt has the structure of its source: where calls and reasoning are written, and how the
answer begins. The sources are the templates in models/templates of llama.cpp and in examples of
vLLM, and those of the makers where they are named.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from router.dialects.dialect import dialect_for
from router.text.chat_template import ChatTemplate

TALK = [{"role": "user", "content": "Hello"}]
MESSAGES = "{% for message in messages %}{{ message.content }}{% endfor %}"
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + MESSAGES
CALLS = "{% for message in messages %}{% for call in message.tool_calls or [] %}"
ENDS = "{% endfor %}{% endfor %}"
IM_START = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
NO_THINKING = (
    IM_START + "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
)
SPLIT = "{% set content = ''.split('</think>')[-1].lstrip('\\n') %}"
ASSISTANT = "{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}"
DEEPSEEK = "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + "
BLOCK = "call.type + '<｜tool▁sep｜>' + call.function.name + '\\n' + '```json' + '\\n' }}"
MISTRAL = "{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{{ '[INST]' }}"
BY_NAME = "{{ '[TOOL_CALLS]' + call.function.name"
HARMONY = "{{ '<|start|>assistant<|channel|>analysis<|message|>' }}"
OBJECT = """{{ '{"name": "' + call.function.name + '", ' }}{{ '"parameters": ' }}"""


@dataclass(frozen=True)
class Template:
    source: str
    text: str
    tools: str
    reasoning: str | None = None
    special: tuple[str, ...] = ()
    opened: bool = False
    """Whether the prompt begins the reasoning."""


TEMPLATES = [
    Template("vllm tool_chat_template_hermes.jinja", TOOLS + "{{ '<tool_call>\\n' }}", "hermes"),
    Template(
        "Qwen-Qwen3-0.6B", TOOLS + SPLIT + "{{ '<tool_call>' }}" + NO_THINKING, "hermes", "think"
    ),
    # It also has xml_tools.
    Template(
        "HuggingFaceTB/SmolLM3-3B",
        "{{ 'You are SmolLM: <think> Thought section </think> Solution' }}{% if xml_tools or tools"
        " %}{{ 'within <tool_call></tool_call> XML tags' }}{% endif %}" + MESSAGES,
        "hermes",
        "think",
    ),
    Template("HuggingFaceTB/SmolLM2-135M-Instruct", "{{ 'You are SmolLM' }}" + MESSAGES, "smollm"),
    Template(
        "Qwen3-Coder",
        TOOLS + CALLS + "{{ '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}" + ENDS,
        "qwen3_coder",
    ),
    Template(
        "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
        MESSAGES
        + CALLS
        + DEEPSEEK
        + BLOCK
        + ENDS
        + SPLIT
        + ASSISTANT
        + "{{ '<think>\\n' }}{% endif %}",
        "deepseek_v3",
        "think",
        opened=True,
    ),
    Template(
        "vllm tool_chat_template_deepseekv3.jinja",
        TOOLS + CALLS + DEEPSEEK + BLOCK + ENDS + ASSISTANT + "{% endif %}",
        "deepseek_v3",
    ),
    Template(
        "deepseek-ai-DeepSeek-V3.1",
        MESSAGES
        + CALLS
        + DEEPSEEK
        + "call.function.name + '<｜tool▁sep｜>' }}"
        + ENDS
        + ASSISTANT
        + "{{ '<think>' if thinking else '</think>' }}{% endif %}",
        "deepseek_v31",
        "think",
    ),
    Template(
        "glm_4_5, GLM-4.6",
        TOOLS
        + CALLS
        + "{{ '\\n<tool_call>' + call.name }}<arg_key>{{ 1 }}</arg_key>"
        + ENDS
        + SPLIT,
        "glm45",
        "think",
    ),
    Template(
        "moonshotai-Kimi-K2-Thinking",
        TOOLS + CALLS + "<|tool_calls_section_begin|>" + ENDS + "<think>{{ 1 }}</think>",
        "kimi_k2",
        "think",
    ),
    # Its calls are not in its template.
    Template(
        "moonshotai-Kimi-K2",
        "{% if tools %}{{ '<|im_system|>tool_declare<|im_middle|>' }}{% endif %}" + MESSAGES,
        "kimi_k2",
        special=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    ),
    Template(
        "unsloth-MiniMax-M2",
        "{% set toolcall_begin_token = '<minimax:tool_call>' %}"
        + TOOLS
        + SPLIT
        + "{% if add_generation_prompt %}{{ ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{% endif %}",
        "minimax_m2",
        "think",
        opened=True,
    ),
    Template(
        "openai-gpt-oss-120b",
        TOOLS + HARMONY + "{{ '<|start|>assistant to=functions.' }}{{ '<|channel|>commentary ' }}",
        "harmony",
        "harmony",
    ),
    *(
        Template(source, MISTRAL + CALLS + call + ENDS, name, None, ("[TOOL_CALLS]",))
        for source, call, name in (
            ("mistralai-Mistral-Nemo-Instruct-2407", "{{ '[TOOL_CALLS][' }}", "mistral"),
            ("mistralai-Mistral-Small-3.1-24B", "{{ '[TOOL_CALLS] [' }}", "mistral"),
            ("Mistral-Small-3.2-24B", BY_NAME + " + '[CALL_ID]' + '[ARGS]' }}", "mistral_args"),
            ("unsloth-mistral-Devstral-Small-2507", BY_NAME + " + '[ARGS]' }}", "mistral_args"),
        )
    ),
    Template(
        "mistralai-Ministral-3-14B-Reasoning-2512",
        "{{ '[SYSTEM_PROMPT][THINK]Your thoughts[/THINK]Here[/SYSTEM_PROMPT]' }}"
        + MISTRAL
        + CALLS
        + BY_NAME
        + " + '[ARGS]' }}"
        + ENDS,
        "mistral_args",
        "mistral",
    ),
    Template(
        "meta-llama-Llama-3.3-70B-Instruct",
        TOOLS + CALLS + "{{ '<|python_tag|>' + call.name }}" + OBJECT + ENDS,
        "llama3",
        special=("<|python_tag|>",),
    ),
    Template(
        "vllm tool_chat_template_llama4_json.jinja",
        TOOLS + CALLS + OBJECT + ENDS,
        "llama4_json",
        special=("<|python_start|>", "<|python_end|>"),
    ),
    Template(
        "vllm tool_chat_template_llama4_pythonic.jinja",
        TOOLS + CALLS + "{{ call.name + '(' }}" + ENDS,
        "llama4",
        special=("<|python_start|>", "<|python_end|>"),
    ),
    Template(
        "vllm tool_chat_template_gemma3_pythonic.jinja",
        TOOLS + "{{ '<start_of_turn>' }}" + CALLS + "{{ call.name + '(' }}" + ENDS,
        "gemma",
    ),
]


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.source)
def test_the_dialect_of_a_template_is_found(template: Template) -> None:
    chat = ChatTemplate(template.text, {})
    found = dialect_for("auto", "auto", chat, template.special.__contains__)
    assert found.tools.name == template.tools
    assert (found.reasoning.name if found.reasoning else None) == template.reasoning
    prompt = chat.render(TALK, 1000, [{"x": 1}]).result()
    assert template.opened is (found.reasoning is not None and found.reasoning.is_opened_by(prompt))
