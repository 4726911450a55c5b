from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from baton.config.cluster import Config
from loadtest.generator.workload.lengths import Lengths
from loadtest.research.validation.offered_load import OfferedLoad
from loadtest.research.validation.predicted import predicted, with_call_time
from loadtest.research.validation.timed_case import PROBE, settings_of, shape_of
from planning.simulator.cluster_shape import ClusterShape

LOAD = OfferedLoad(2.0, 10.0, Lengths.parse("uniform:50-400"), Lengths.parse("uniform:5-20"))


@pytest.fixture
def shape() -> ClusterShape:
    return shape_of(settings_of(1, 1))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return settings_of(1, 1).configuration(tmp_path)


def called(shape: ClusterShape, call_s: float) -> ClusterShape:
    return replace(
        shape,
        prefill_profile=replace(shape.prefill_profile, call_s=call_s),
        decode_profile=replace(shape.decode_profile, call_s=call_s),
    )


def test_what_is_sent_is_what_is_simulated() -> None:
    sent, simulated = LOAD.planned(run=5), LOAD.traced()
    assert [(one.due_s, one.input_tokens, one.output_tokens) for one in sent] == [
        (one.arrival_s, one.input_tokens, one.output_tokens) for one in simulated
    ]
    assert all(len(one.prompt) == one.input_tokens for one in sent)
    assert sent[0].prompt != LOAD.planned(run=6)[0].prompt


def test_each_load_has_its_own_records_from_its_own_beginning(
    shape: ClusterShape, config: Config
) -> None:
    first, second = predicted([(3.0, LOAD), (300.0, LOAD)], shape, config)
    assert [record.due_s for record in second] == pytest.approx(
        [request.arrival_s for request in LOAD.traced()]
    )
    for records in (first, second):
        assert {record.outcome for record in records} == {"ok"}
        for record, request in zip(records, LOAD.traced(), strict=True):
            assert record.output_tokens == len(record.token_times_s) == request.output_tokens
            assert 0 < record.ttft_s < 10
            assert (np.diff(record.token_times_s) > 0).all()
            # The last message comes behind the last token.
            assert record.ended_s == pytest.approx(record.token_times_s[-1])


def test_the_probe_finds_how_long_a_message_takes(shape: ClusterShape, config: Config) -> None:
    (seen,) = predicted([(0.0, PROBE)], called(shape, 0.004), config)
    found = with_call_time(shape, config, PROBE, seen)
    assert found.prefill_profile.call_s == pytest.approx(0.004, rel=1e-6)
    assert found.decode_profile.call_s == found.prefill_profile.call_s


def test_a_cluster_faster_than_its_steps_has_messages_of_no_time(
    shape: ClusterShape, config: Config
) -> None:
    (seen,) = predicted([(0.0, PROBE)], called(shape, 0.0), config)
    early = [replace(one, due_s=one.due_s + 0.01) for one in seen]
    assert with_call_time(shape, config, PROBE, early).decode_profile.call_s == 0.0
