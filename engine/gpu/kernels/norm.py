"""RMSNorm (Zhang and Sennrich, 2019) of the residual stream, after an addition to it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Launch, check_strides, power_of_two

_WIDEST = 65536


@triton.jit  # type: ignore[untyped-decorator]
def norm_kernel(  # type: ignore[no-untyped-def]
    residual,
    added,
    added_weight,
    weight,
    out,
    stride_residual,
    stride_added,
    eps,
    hidden: tl.constexpr,
    width: tl.constexpr,
    adds: tl.constexpr,
    norms_added: tl.constexpr,
):
    """Add and normalize one row, which is held in registers."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    inside = at < hidden
    value = tl.load(residual + row * stride_residual + at, mask=inside, other=0.0)
    if adds:
        more = tl.load(added + row * stride_added + at, mask=inside, other=0.0).to(tl.float32)
        if norms_added:
            mean = tl.sum(more * more, axis=0) / hidden
            factor = tl.load(added_weight + at, mask=inside, other=0.0)
            more = more * tl.rsqrt(mean + eps) * factor
        value += more
        tl.store(residual + row * stride_residual + at, value, mask=inside)
    mean = tl.sum(value * value, axis=0) / hidden
    normed = value * tl.rsqrt(mean + eps) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(out + row * hidden + at, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    added_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add ``added`` to ``residual`` in place. Returns the normalized sum as ``dtype`` [rows,
    hidden].

    ``residual`` is fp32 [rows, hidden], ``added`` is of any float type [rows, hidden] or None, and
    ``weight`` is fp32 [hidden]. With ``added_weight``, fp32 [hidden], ``added`` is normalized first
    (Gemma 2, OLMo 2). Everything is computed in fp32, and the result is rounded once. Raises
    ValueError if shapes or types do not fit.
    """
    out = torch.empty(residual.shape, dtype=dtype, device=residual.device)
    norm_launch(out, residual, added, weight, eps, added_weight).run()
    return out


def norm_launch(
    out: torch.Tensor,
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    added_weight: torch.Tensor | None = None,
) -> Launch:
    """Describe the kernel launch that computes ``add_norm`` into ``out``."""
    rows, hidden = residual.shape
    if hidden > _WIDEST:
        raise ValueError(f"rows of {hidden} numbers are too long: at most {_WIDEST}")
    if residual.dtype != torch.float32 or (added is not None and added.shape != residual.shape):
        raise ValueError("the residual must be fp32, and added must have its shape")
    for factor in (weight, added_weight):
        if factor is not None and (factor.dtype != torch.float32 or factor.shape != (hidden,)):
            raise ValueError(f"a norm's weight must be fp32 [{hidden}]")
    check_strides(residual, "the residual")
    if added is not None:
        check_strides(added, "added")
    # At least as wide as the program has threads: if two threads held a value, one could write it
    # while the other still reads it.
    width = max(256, power_of_two(hidden))
    return Launch(
        norm_kernel,
        (rows,),
        {
            "residual": residual,
            "added": added,
            "added_weight": added_weight,
            "weight": weight,
            "out": out,
            "stride_residual": residual.stride(0),
            "stride_added": 0 if added is None else added.stride(0),
            "eps": eps,
        },
        {
            "hidden": hidden,
            "width": width,
            "adds": added is not None,
            "norms_added": added is not None and added_weight is not None,
        },
        warps=min(16, max(4, width // 1024)),
    )


def add_norm_reference(
    residual: torch.Tensor,
    added: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype,
    added_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference for ``add_norm``, in plain torch. Returns the new residual, and the normalized
    sum."""

    def norm(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * factor

    if added is not None:
        more = added.float()
        residual = residual + (more if added_weight is None else norm(more, added_weight))
    return residual, norm(residual, weight).to(dtype)
