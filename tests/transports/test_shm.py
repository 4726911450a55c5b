"""kvtransfer/transports/shm_transport.py does what every transport does."""

from __future__ import annotations

from tests.support.kvtransfer.conformance import TransportConformance


class TestShm(TransportConformance):
    transport = "shm"
