"""A front of a model that reasons: its tokens, its template, and what it says."""

from __future__ import annotations

import functools
from dataclasses import replace

import tokenizers
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.telemetry.metrics import RouterMetrics
from router.core.accounting import RequestStats
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.support.router.front_fakes import (
    EOS,
    MODEL,
    TEMPLATE,
    Front,
    ScriptedDispatcher,
    tiny_backend,
)

CONTEXT = 4096
MARKERS = ("<think>", "</think>")
SWITCHED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
"""As Qwen 3 has it: the model begins to reason by itself, unless it is switched off."""
OPENED = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
"""As DeepSeek R1 has it: the template begins the reasoning."""
WITH_EFFORT = SWITCHED.replace(
    "{% for m", "{% if reasoning_effort %}Reasoning: {{ reasoning_effort }}\n{% endif %}{% for m", 1
)
REASONED = "<think>\nLet me think.\n</think>\n\nParis."


@functools.cache
def _tokenizer(template: str, *, has_markers: bool) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(tiny_backend().to_str())
    if has_markers:
        # As Qwen's tokenizer has them: of their own, and not special.
        backend.add_tokens([tokenizers.AddedToken(text, special=False) for text in MARKERS])
    eos = backend.token_to_id(EOS)
    assert eos is not None
    return Tokenizer(backend, eos_ids=[eos], chat_template=ChatTemplate(template, {}))


def reasoning_front(
    template: str = SWITCHED, text: str = REASONED, *, has_markers: bool = True
) -> Front:
    """``has_markers``: whether the markers are tokens of their own."""
    tokenizer = _tokenizer(template, has_markers=has_markers)
    dispatcher = ScriptedDispatcher(tokenizer, text=text, context_length=CONTEXT)
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    return Front(dispatcher, stats, Config(), tokenizer, replace(MODEL, context_length=CONTEXT))
