"""Checks correctness: compares everything that a GPU computes with references in fp32."""
