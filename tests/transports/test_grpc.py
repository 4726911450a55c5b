"""kvtransfer/grpc_transport.py does what every transport does."""

from __future__ import annotations

from tests.transports.conformance import TransportConformance


class TestGrpc(TransportConformance):
    transport = "grpc"
