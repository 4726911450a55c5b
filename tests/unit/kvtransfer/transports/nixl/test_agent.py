"""kvtransfer/transports/nixl/agent.py where nixl or its peer is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from baton.errors import ConfigError, HandoffError
from kvtransfer.transports.nixl.agent import NixlAgent


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(ConfigError, match=r'pip install "baton-llm\[nixl\]"'):
        NixlAgent("none")


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[NixlAgent]:
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp,sm,self")
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")
    agent = NixlAgent("here")
    yield agent
    agent.close()


@pytest.mark.parametrize("metadata", [b"", b"garbage", b"nixlSerDes|Agent\xff\xff\xff\x7f"])
def test_metadata_that_is_none_is_refused(agent: NixlAgent, metadata: bytes) -> None:
    with pytest.raises(HandoffError, match="metadata"):
        agent.load(metadata)


def test_memory_that_ucx_cannot_have_is_refused(agent: NixlAgent) -> None:
    with pytest.raises(ConfigError, match="cannot register memory"):
        agent.register(1 << 64, 4096)


def test_ways_that_ucx_does_not_have_are_an_error_of_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("nixl", reason="the extra nixl is not installed")
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_NET_DEVICES", "none0")
    with pytest.raises(ConfigError, match="UCX"):
        NixlAgent("none")
