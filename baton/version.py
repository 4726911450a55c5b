"""The version of Baton. It stands here alone: packages, image and chart take it from here."""

from __future__ import annotations

VERSION = "0.1.0"
