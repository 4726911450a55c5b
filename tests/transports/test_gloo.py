"""kvtransfer/transports/process_group/transport.py does with gloo what every transport does."""

from __future__ import annotations

from tests.support.kvtransfer.conformance import TransportConformance


class TestGloo(TransportConformance):
    transport = "gloo"
