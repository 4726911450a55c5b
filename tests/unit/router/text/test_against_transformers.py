"""Tokens and prompts of model folders, compared with ``AutoTokenizer`` of transformers.

The long tests take each kind of folder with every published chat template and every conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from baton.config.cluster import Config
from baton.config_fields import ConfigFields
from baton.errors import InvalidRequest
from router.dialects.dialect import dialect_for
from router.inference.prompt import PromptEncoder
from router.text.special_tokens import read_special_tokens
from router.text.tokenizer import Tokenizer
from tests.support.programs import chat_templates
from tests.support.router.conversations import CONVERSATIONS, Conversation
from tests.support.router.tokenizer_folders import CORPUS, KINDS

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK_TEMPLATES = (
    "Qwen3-Coder",
    "Kimi-K3",
    "google-gemma-2-2b-it",
    "meta-llama-Llama-3.2-3B-Instruct",
)
TOOLS = frozenset({"tools", "tools and a system message"})
CALLS = frozenset({"a call", "an answer after a call", "two calls"})
EVERY = frozenset(CONVERSATIONS)
SAVED = "saved by transformers"


@dataclass(frozen=True)
class Row:
    """Prompts that differ from those of transformers, and why."""

    reason: str
    conversations: frozenset[str]
    templates: frozenset[str]


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_TOOLS = names(
    """deepseek-ai-DeepSeek-R1-Distill-Llama-8B deepseek-ai-DeepSeek-R1-Distill-Qwen-32B
    deepseek-ai-DeepSeek-V3.1 google-gemma-2-2b-it HuggingFaceTB-SmolLM3-3B llama-cpp-rwkv-world
    microsoft-Phi-3.5-mini-instruct"""
)
NEEDS_TOOLS = names(
    """CohereForAI-c4ai-command-r-plus-tool_use fireworks-ai-llama-3-firefunction-v2
    NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use"""
)
ROWS = (
    Row("the template writes no tools, or only under a name of its own", TOOLS | CALLS, NO_TOOLS),
    Row(
        "the template writes no calls, or no results by name",
        CALLS,
        names(
            """ByteDance-Seed-OSS ibm-granite-granite-3.3-2B-Instruct LFM2-8B-A1B LFM2.5-8B-A1B
            LFM2.5-Instruct"""
        ),
    ),
    Row(
        "the template takes arguments as text or as an object, and Baton as text",
        CALLS,
        names("Apriel-1.6-15b-Thinker-fixed unsloth-Apriel-1.5"),
    ),
    Row("the template wants arguments as text", CALLS, names("meetkai-functionary-medium-v3.2")),
    Row(
        "the template refuses a system message",
        frozenset({"a system message", "five turns with a system message"}),
        names("google-gemma-2-2b-it"),
    ),
    Row(
        "the template refuses two messages of a role in a row",
        frozenset({"two questions in a row"}),
        names(
            """google-gemma-2-2b-it mistralai-Ministral-3-14B-Reasoning-2512
            mistralai-Mistral-Nemo-Instruct-2407 Mistral-Small-3.2-24B-Instruct-2506"""
        ),
    ),
    Row(
        "the template refuses two calls in a message",
        frozenset({"two calls"}),
        names(
            """meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct
            meta-llama-Llama-3.3-70B-Instruct"""
        ),
    ),
    Row(
        "the template fails without tools, in transformers too", EVERY - TOOLS - CALLS, NEEDS_TOOLS
    ),
    Row(
        "the template needs fields or functions of another server, in transformers too",
        TOOLS | CALLS,
        names(
            """CohereForAI-c4ai-command-r-plus-tool_use fireworks-ai-llama-3-firefunction-v2
            llama-cpp-deepseek-r1"""
        ),
    ),
    Row(
        "the sandbox forbids what the template does, in transformers too",
        CALLS,
        names("Kimi-K2-Instruct Kimi-K2-Thinking"),
    ),
)


def known(template: str) -> Iterator[tuple[str, str]]:
    """The conversations that differ with a template, and why."""
    for row in ROWS:
        if template in row.templates:
            yield from ((name, row.reason) for name in row.conversations)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    KINDS[kind](tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    added = [str(token) for token in theirs.added_tokens_decoder.values()]
    assert added, "the texts have added tokens"
    texts = [*CORPUS, " ".join(added), "".join(added), "Hi é".join(added), " x ".join(added) + " ."]
    for text in texts:
        for special in (True, False):
            ids = _ids(theirs, text, special=special)
            assert list(ours.encode(text, add_special_tokens=special)) == ids
            for skip in (True, False):
                assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                    ids, skip_special_tokens=skip
                )
    eos = theirs.eos_token_id
    assert ours.eos_ids == (set() if eos is None else {eos})
    files = ("tokenizer_config.json", "config.json")
    settings, config = (ConfigFields.read_if_any(tmp_path / name) for name in files)
    assert read_special_tokens(tmp_path, settings, config).names == theirs.special_tokens_map


@pytest.fixture
def sources() -> dict[str, str]:
    """The published templates by name."""
    return {file.stem: file.read_text() for file in sorted(chat_templates().glob("*.jinja"))}


@pytest.mark.parametrize("template", QUICK_TEMPLATES)
async def test_prompts_of_some_models_are_those_of_transformers(
    template: str, tmp_path: Path, sources: Mapping[str, str]
) -> None:
    await _compare(SAVED, template, sources[template], tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
async def test_prompts_are_those_of_transformers(
    kind: str, tmp_path: Path, sources: Mapping[str, str]
) -> None:
    assert len(sources) >= 70
    for name, source in sources.items():
        await _compare(kind, name, source, tmp_path)


async def _compare(kind: str, template: str, source: str, folder: Path) -> None:
    """Compare the prompts of all conversations except those of ``ROWS``, which must differ."""
    KINDS[kind](folder)
    (folder / "chat_template.jinja").write_text(source)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    found = ours.chat_template
    dialect = dialect_for("auto", "auto", found, lambda text: bool(ours.special_ids([text])))
    encoder = PromptEncoder(ours, dialect.tools, Config(), lambda: 1 << 20)
    reasons = dict(known(template))
    for name, conversation in CONVERSATIONS.items():
        expected = _expected(theirs, conversation)
        prompt = await _prompt(encoder, conversation)
        if expected is None and kind != SAVED:
            # The template writes a special token that this kind of folder does not name.
            continue
        equal = expected is not None and prompt == expected
        reason = reasons.get(name)
        assert equal == (reason is None), (kind, template, name, reason, expected, prompt)


async def _prompt(encoder: PromptEncoder, one: Conversation) -> list[int] | None:
    ending: Any = "closed" if one.closed else "answer"
    try:
        return list(await encoder.chat_ids("", list(one.turns), one.tools, ending=ending))
    except InvalidRequest:
        return None


def _expected(tokenizer: Any, one: Conversation) -> list[int] | None:
    """The prompt of transformers; None if the template fails there."""
    tools = [tool.as_template_value() for tool in one.tools.tools] if one.tools else None
    try:
        text = tokenizer.apply_chat_template(
            one.messages(), tools=tools, add_generation_prompt=not one.closed, tokenize=False
        )
    except Exception:
        return None
    return _ids(tokenizer, text, special=False)


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    found: Mapping[str, list[int]] = tokenizer(
        text, add_special_tokens=special, truncation=False, padding=False
    )
    return found["input_ids"]
