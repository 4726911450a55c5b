"""The distinct requests of the load: greedy and seeded, plain and constrained, short and long.

Each has one right answer, because it is greedy or has a seed and the cluster is deterministic.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from baton.v1 import inference_pb2, sampling_pb2, tools_pb2

Way = Literal["http", "grpc"]
WAYS: tuple[Way, ...] = ("http", "grpc")

_WORDS = (
    *("a", "red", "house", "stands", "near", "the", "old", "harbour", "and", "seven", "grey"),
    *("boats", "wait", "for", "calm", "water", "while", "some", "children", "count", "birds"),
    *("above", "quiet", "hills", "under", "slow", "clouds", "before", "rain", "comes", "home"),
)
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer"},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
_WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Question:
    """One request, which may be asked any number of times and over either way."""

    name: str
    prompt: str
    max_tokens: int
    """Of each choice."""
    is_chat: bool = False
    seed: int | None = None
    """None: the most likely tokens."""
    choices: int = 1
    schema: Mapping[str, Any] | None = None
    """What the answer's JSON must look like."""
    tool: Mapping[str, Any] | None = None
    """The arguments' schema of a function that must be called."""
    ignore_eos: bool = True
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""

    @property
    def path(self) -> str:
        """Of the HTTP front."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, model: str) -> dict[str, Any]:
        """For the HTTP front; the answer is streamed and has its tokens' ids."""
        body: dict[str, Any] = {
            "model": model,
            "stream": True,
            "return_token_ids": True,
            "max_tokens": self.max_tokens,
            "n": self.choices,
            "temperature": 0.0 if self.seed is None else 1.0,
            "ignore_eos": self.ignore_eos,
            "stop": list(self.stop),
        }
        if self.seed is not None:
            body["seed"] = self.seed
        if self.schema is not None:
            schema = {"name": "answer", "schema": self.schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.tool is not None:
            function = {"name": "weather", "parameters": self.tool}
            body["tools"] = [{"type": "function", "function": function}]
            body["tool_choice"] = "required"
        if self.is_chat:
            return body | {"messages": [{"role": "user", "content": self.prompt}]}
        return body | {"prompt": self.prompt}

    def message(self) -> inference_pb2.GenerateRequest:
        """For the gRPC front."""
        sampling = sampling_pb2.SamplingParameters(
            temperature=0.0 if self.seed is None else 1.0,
            max_tokens=self.max_tokens,
            ignore_eos=self.ignore_eos,
            stop=self.stop,
        )
        if self.seed is not None:
            sampling.seed = self.seed
        if self.schema is not None:
            sampling.grammar.json_schema = json.dumps(self.schema)
        request = inference_pb2.GenerateRequest(sampling=sampling, n=self.choices)
        if self.is_chat:
            request.messages.messages.add(role="user", content=self.prompt)
        else:
            request.prompt = self.prompt
        if self.tool is not None:
            tool = tools_pb2.Tool(name="weather", parameters=json.dumps(self.tool))
            request.tools.tools.append(tool)
            request.tools.mode = tools_pb2.TOOL_MODE_REQUIRED
        return request


def questions(seed: int) -> tuple[Question, ...]:
    """The mix of a run; the prompts' words follow ``seed``."""
    source = random.Random(seed)

    def words(count: int) -> str:
        return " ".join(source.choices(_WORDS, k=count))

    return (
        Question("greedy", words(24), 60),
        Question("greedy long prompt", words(500), 40),
        Question("greedy long answer", words(12), 120),
        Question("seeded", words(40), 60, seed=11),
        Question("seeded long prompt", words(350), 50, seed=12),
        Question("seeded, may end", words(16), 60, seed=13, ignore_eos=False),
        Question("seeded, may stop", words(20), 60, seed=19, stop=(".", " and the", " of a")),
        Question("chat", f"Tell a story of {words(6)}.", 60, is_chat=True),
        Question("chat, seeded", f"Write about {words(60)}.", 50, is_chat=True, seed=14),
        Question("two choices", words(30), 40, seed=15, choices=2),
        Question("two choices of a chat", words(200), 30, seed=16, choices=2, is_chat=True),
        Question("schema", "Describe a sailor as JSON.", 60, is_chat=True, schema=_PERSON),
        Question("schema, seeded", "A person as JSON:", 60, seed=17, schema=_PERSON),
        Question("tool", "The weather in Rome for 2 days?", 50, is_chat=True, tool=_WEATHER),
        Question("tool, seeded", "Is it hot?", 50, is_chat=True, seed=18, tool=_WEATHER),
    )
