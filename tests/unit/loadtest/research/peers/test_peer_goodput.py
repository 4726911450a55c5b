"""Goodput of several servers under many SLOs: the mix, and the arithmetic."""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from baton.errors import ConfigError
from loadtest.research.peers.peer_goodput import (
    _CHAT,
    _DOCUMENT,
    SLOS,
    Mix,
    RateFigures,
    Texts,
    goodput,
    rates,
    rates_in,
    show,
)


def _figures(rate: float, attainment: float) -> RateFigures:
    return RateFigures(rate, 100, (attainment,) * len(SLOS), 1.0, 2.0, 3.0, 4.0, ())


def test_the_mix_has_both_kinds_in_their_share_and_other_text_in_each_run() -> None:
    count = 400
    first, again, other = (
        [mix.request(number, 0.0) for number in range(count)]
        for mix in (Mix(0.25, 5, 0), Mix(0.25, 5, 0), Mix(0.25, 5, 1))
    )
    assert first == again
    lengths = [[(one.input_tokens, one.output_tokens) for one in run] for run in (first, other)]
    assert lengths[0] == lengths[1]
    assert all(one.prompt != two.prompt for one, two in zip(first, other, strict=True))
    documents = [one for one in first if one.input_tokens >= 1000]
    assert 0.18 * count < len(documents) < 0.32 * count
    assert all(16 <= one.output_tokens <= 48 for one in documents)
    assert all(one.input_tokens <= 400 for one in first if one not in documents)
    assert {len(kind) for kind in (_CHAT, _DOCUMENT)} == {2}


def test_texts_are_questions_and_passages_of_files(tmp_path: Path) -> None:
    rows = [
        *({"category": "rag", "turns": [f"passage {n} " + "words " * 300]} for n in range(20)),
        *({"category": "math", "turns": [f"question {n}"]} for n in range(20)),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    texts = Texts.read(tmp_path)
    mix, again = (Mix(0.5, 5, 1, texts) for _ in range(2))
    assert mix.has_texts
    assert not Mix(0.5, 5, 1).has_texts
    found = [str(mix.request(number, 0.0).prompt) for number in range(40)]
    assert found == [str(again.request(number, 0.0).prompt) for number in range(40)]
    documents = [text for text in found if text.startswith("passage")]
    assert all(text.startswith("question") for text in found if text not in documents)
    assert 10 < len(documents) < 30
    assert len(set(documents)) == len(documents)
    assert all(3500 < len(text) < 8100 and text.endswith("above.") for text in documents)


def test_a_folder_without_passages_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"category": "math", "turns": ["question"]}')
    with pytest.raises(ConfigError, match="'rag'"):
        Texts.read(tmp_path)


@pytest.mark.parametrize(
    ("attainments", "best"),
    [
        ((1.0, 0.95, 0.9, 0.5), 3.0),
        # What was met above a rate that failed was luck.
        ((1.0, 0.8, 0.95, 0.5), 1.0),
        ((0.5, 1.0, 1.0, 1.0), 0.0),
        ((1.0, 1.0, 1.0, 1.0), 4.0),
    ],
)
def test_goodput_is_the_highest_rate_below_all_that_failed(
    attainments: tuple[float, ...], best: float
) -> None:
    found = [_figures(rate, share) for rate, share in enumerate(attainments, start=1)]
    assert goodput(found, 0) == best


def test_rates_rise_by_a_quarter() -> None:
    assert list(itertools.islice(rates(0.8), 4)) == [0.8, 1.0, 1.25, 1.56]


def test_the_table_has_a_row_for_each_slo_and_ratios_to_the_first() -> None:
    console = Console(width=200, record=True, force_terminal=False)
    show(
        {
            "baton": [_figures(1.0, 1.0), _figures(3.0, 1.0)],
            "vllm": [_figures(1.0, 1.0), _figures(3.0, 0.1)],
            "other": [_figures(0.8, 0.0)],
        },
        console,
    )
    text = console.export_text()
    assert text.count("  3.00×") == len(SLOS)
    # Of a server that failed at the lowest rate that was tried no more is known.
    assert text.count("below 0.80") == len(SLOS)
    assert text.count("above 3.75×") == len(SLOS)


@pytest.mark.parametrize("text", ["", "0,1", "2,1", "1,1", "1,inf", "1,nan", "x"])
def test_rates_that_are_given_rise(text: str) -> None:
    assert rates_in("0.25,0.5,1") == (0.25, 0.5, 1.0)
    with pytest.raises(argparse.ArgumentTypeError, match="is not a list of rising rates"):
        rates_in(text)
