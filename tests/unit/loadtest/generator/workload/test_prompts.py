"""Prompts: equal numbers are equal prefixes, everything else differs; and prompts from files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from loadtest.generator.workload.lengths import Lengths
from loadtest.generator.workload.prompts import FilePrompt, Form, PromptMaker, read_prompts
from loadtest.generator.workload.traffic import DrawnLengths, PromptList, Source, TraceRows
from planning.common.traces import Trace, TracedRequest

FORMS: tuple[Form, ...] = ("text", "tokens")
BLOCK = 16


def parts(prompt: str | tuple[int, ...]) -> list[object]:
    return list(prompt.split()) if isinstance(prompt, str) else list(prompt)


@given(
    st.sampled_from(FORMS),
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.lists(st.integers(0, 50), min_size=1, max_size=6),
    st.integers(0, 100),
)
def test_equal_numbers_are_equal_prefixes(
    form: Form, one: list[int], other: list[int], more: int
) -> None:
    maker = PromptMaker(form, 7)
    tokens = BLOCK * len(one) + more
    first = parts(maker.of_blocks(0, tokens, one, BLOCK))
    second = parts(maker.of_blocks(1, BLOCK * len(other), other, BLOCK))
    assert (len(first), len(second)) == (tokens, BLOCK * len(other))
    common = 0
    while common < min(len(one), len(other)) and one[common] == other[common]:
        common += 1
    end = common * BLOCK
    assert first[:end] == second[:end]
    if common < min(len(one), len(other)):
        assert first[end : end + BLOCK] != second[end : end + BLOCK]


@pytest.mark.parametrize("form", FORMS)
def test_fresh_prompts_have_their_length_and_differ(form: Form) -> None:
    prompts = [parts(PromptMaker(form, seed).fresh(n, 40)) for seed in (1, 2) for n in (0, 1)]
    assert {len(prompt) for prompt in prompts} == {40}
    assert len({tuple(prompt[:BLOCK]) for prompt in prompts}) == 4
    assert parts(PromptMaker(form, 1).fresh(0, 40)) == prompts[0]


def sources(seed: int, run: int) -> list[Source]:
    rows = tuple(TracedRequest(0.0, 20 + n, 5 + n, (0, n)) for n in range(3))
    return [
        DrawnLengths(
            Lengths.parse("uniform:10-90"), Lengths.parse("4"), "tokens", seed=seed, run=run
        ),
        TraceRows(Trace(rows, BLOCK), "tokens", seed=seed, run=run),
    ]


@pytest.mark.parametrize("kind", [0, 1])
def test_another_run_has_the_same_lengths_of_other_text(kind: int) -> None:
    made = {
        run: [sources(3, run)[kind].request(number, 0.0) for number in range(8)] for run in (0, 1)
    }
    again = [sources(3, 0)[kind].request(number, 0.0) for number in range(8)]
    assert made[0] == again
    for one, other in zip(made[0], made[1], strict=True):
        assert (one.input_tokens, one.output_tokens) == (other.input_tokens, other.output_tokens)
        assert len(one.prompt) == one.input_tokens
        assert one.prompt[:BLOCK] != other.prompt[:BLOCK]


def test_a_trace_restarts_with_other_prefixes() -> None:
    (_, rows) = sources(3, 0)
    first, again = rows.request(1, 0.0), rows.request(4, 9.0)
    assert again.input_tokens == first.input_tokens
    assert again.prompt[:BLOCK] != first.prompt[:BLOCK]
    assert rows.request(2, 0.0).prompt[:BLOCK] == first.prompt[:BLOCK]


def test_files(tmp_path: Path) -> None:
    rows = [
        {"prompt": "one", "output_tokens": 9},
        {"turns": ["two", "three"]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "four"}]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows[:2])) + "\n\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(rows[2]))
    found = read_prompts(tmp_path)
    assert found == (FilePrompt("one", 9), FilePrompt("two"), FilePrompt("four"))
    assert read_prompts(tmp_path / "b.jsonl") == (FilePrompt("four"),)
    source = PromptList(found, Lengths.parse("33"), seed=1)
    asked = [source.request(number, 0.0) for number in range(6)]
    for turn in (asked[:3], asked[3:]):
        assert {(one.prompt, one.output_tokens) for one in turn} == {
            ("one", 9),
            ("two", 33),
            ("four", 33),
        }


@pytest.mark.parametrize(
    "line", ["{", "[]", "{}", '{"prompt": 5}', '{"turns": []}', '{"messages": []}', '"text"']
)
def test_a_line_at_fault_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n' + line)
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2"):
        read_prompts(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no prompts"):
        read_prompts(tmp_path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts(tmp_path / "none.jsonl")
