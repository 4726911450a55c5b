"""kvtransfer/transports/nixl/transport.py does what every transport does."""

from __future__ import annotations

import pytest

from tests.support.kvtransfer.conformance import TransportConformance

pytest.importorskip("nixl", reason="nixl is not installed: make install-dev")


class TestNixl(TransportConformance):
    transport = "nixl"
