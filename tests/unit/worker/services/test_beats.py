"""How often a worker says that it lives."""

from __future__ import annotations

from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from worker.services.beats import DEFAULT_BEATS, Beats


def test_several_come_before_silence_is_a_hang() -> None:
    beats = Beats.of(Config(advanced=AdvancedConfig(hang_s=0.4, heartbeat_s=1.0)))
    assert beats.next_s(busy=True) == 0.1
    assert beats.next_s(busy=False) == 1.0


def test_never_more_seldom_than_heartbeats() -> None:
    advanced = AdvancedConfig(hang_s=60.0, heartbeat_s=0.5)
    assert Beats.of(Config(advanced=advanced)).next_s(busy=True) == 0.5


def test_the_default_is_the_configurations() -> None:
    assert Beats.of(Config()) == DEFAULT_BEATS
