"""Is it right: everything that a GPU computes, beside references in fp32."""
