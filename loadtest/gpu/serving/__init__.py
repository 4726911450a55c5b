"""Checks serving: real workers and routers on one device, with kills and broken CUDA contexts."""
