"""Numbers of benchmark files, matched and compared."""

from __future__ import annotations

import dataclasses
import io
import re

from rich.console import Console

from loadtest.generator.results.summary import Window, summarize
from loadtest.peers.bench_client import ClientResult
from planning.common.slo import Slo
from tools.ab_figures import Figure, compare_runs, numbers, show


def test_numbers_are_named_by_their_path() -> None:
    document = {"a": {"b": 1}, "list": [1, 2.5], "flag": True, "text": "1", "bad": float("nan")}
    assert numbers(document) == {"a.b": [1.0], "list": [1.0, 2.5]}


def test_rows_are_named_by_strings_and_settings_in_any_order() -> None:
    rows = [
        {"transport": "shm", "bytes": 4, "ms": 1},
        {"transport": "grpc", "bytes": 4, "ms": 2},
    ]
    expected = {"rows[shm, bytes=4].ms": [1.0], "rows[grpc, bytes=4].ms": [2.0]}
    for document in ({"rows": rows}, {"rows": rows[::-1]}):
        found = numbers(document)
        assert {path: found[path] for path in found if path.endswith(".ms")} == expected


def test_rows_that_look_alike_are_distinguished_by_position() -> None:
    assert numbers([{"ms": 1}, {"ms": 2}]) == {"[#1].ms": [1.0], "[#2].ms": [2.0]}
    named = numbers([{"name": "a", "ms": 1}, {"name": "a", "ms": 2}])
    assert named == {"[a].ms": [1.0], "[a #2].ms": [2.0]}


def test_repetitions_of_a_comparison_of_peers_are_one_number() -> None:
    fields = dict.fromkeys(ClientResult.model_fields, 1)
    rows = [
        {"peer": "baton", "precision": "fp32", "workload": "a", "repetition": number}
        | ClientResult(**fields | {"output_throughput": 10.0 * number}).model_dump()
        for number in (1, 2, 3)
    ]
    found = numbers({"runs": rows})
    assert found["runs[baton, fp32, a].output_throughput"] == [10.0, 20.0, 30.0]


def test_runs_of_a_load_test_are_named_by_rate() -> None:
    summary = dataclasses.asdict(summarize([], Window(0.0, 1.0), Slo(2.0, 0.1)))
    runs = [{"rate": rate, "concurrency": None, "summary": summary} for rate in (2.0, 4.0)]
    found = numbers({"runs": runs})
    assert "runs[rate=2].summary.all.ttft.p50_ms" in found
    assert "runs[rate=4].summary.goodput_per_s" in found


def test_spread_is_that_of_pairs_and_not_of_sides() -> None:
    # The machine becomes twice as slow from the first pair to the second.
    figure = Figure("ms", (10.0, 20.0), (11.0, 22.0))
    assert figure.ratio() == 1.1
    assert figure.spread() == (1.1, 1.1)


def test_a_zero_has_no_ratio() -> None:
    figure = Figure("errors", (0.0, 0.0), (0.0, 1.0))
    assert figure.ratio() is None
    assert figure.spread() is None


def test_constant_numbers_are_counted_unless_they_are_chosen() -> None:
    pairs = [({"cores": [2.0], "ms": [1.0]}, {"cores": [2.0], "ms": [3.0]})]
    found = compare_runs(pairs)
    assert [figure.path for figure in found.figures] == ["ms"]
    assert found.constant == 1
    chosen = compare_runs(pairs, re.compile("^cores$"))
    assert [figure.path for figure in chosen.figures] == ["cores"]


def test_a_run_counts_with_the_median_of_its_values() -> None:
    [figure] = compare_runs([({"ms": [1.0, 2.0, 9.0]}, {"ms": [4.0]})]).figures
    assert (figure.a, figure.b) == ((2.0,), (4.0,))


def test_numbers_of_one_side_are_reported() -> None:
    found = compare_runs([({"old_ms": [1.0], "ms": [1.0]}, {"new_ms": [1.0], "ms": [2.0]})])
    assert found.unmatched == ("old_ms", "new_ms")
    console = Console(file=io.StringIO(), width=80)
    show(console, found, 1, "A: old, B: new")
    assert isinstance(console.file, io.StringIO)
    assert "2 numbers have no match: old_ms, new_ms." in console.file.getvalue()


def test_names_of_rows_are_shown_with_their_brackets() -> None:
    console = Console(file=io.StringIO(), width=80)
    show(console, compare_runs([({"rows[bold].ms": [1.0]}, {"rows[bold].ms": [2.0]})]), 1, "")
    assert isinstance(console.file, io.StringIO)
    assert "rows[bold].ms" in console.file.getvalue()
