"""What all cases share."""

from __future__ import annotations

import os

import pytest

# Asserts of the shared cases tell what they compare, as those of test modules do.
pytest.register_assert_rewrite("tests.support.kvtransfer.conformance")

# nixl, here and in the processes that tests start: loopback alone.
os.environ.setdefault("UCX_TLS", "tcp,sm,self")
os.environ.setdefault("UCX_NET_DEVICES", "lo")
