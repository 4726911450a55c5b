"""Correctness checks: everything that a GPU computes, compared with references in fp32."""
