"""Asserts of the shared cases tell what they compare, as those of test modules do."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.transports.conformance")
