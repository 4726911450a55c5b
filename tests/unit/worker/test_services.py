"""How often a worker says that it lives."""

from __future__ import annotations

from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from worker.services import DEFAULT_KEEPALIVE, Keepalive


def test_several_come_before_silence_is_a_hang() -> None:
    keepalive = Keepalive.of(Config(advanced=AdvancedConfig(hang_s=0.4, heartbeat_s=1.0)))
    assert keepalive.next_s(busy=True) == 0.1
    assert keepalive.next_s(busy=False) == 1.0


def test_never_more_seldom_than_heartkeepalive() -> None:
    advanced = AdvancedConfig(hang_s=60.0, heartbeat_s=0.5)
    assert Keepalive.of(Config(advanced=advanced)).next_s(busy=True) == 0.5


def test_the_default_is_the_configurations() -> None:
    assert Keepalive.of(Config()) == DEFAULT_KEEPALIVE
