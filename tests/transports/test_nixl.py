"""kvtransfer/nixl_transport.py does what every transport does."""

from __future__ import annotations

import pytest

from tests.transports.conformance import TransportConformance

pytest.importorskip("nixl", reason="nixl is not installed: pip install baton[nixl]")


class TestNixl(TransportConformance):
    transport = "nixl"
