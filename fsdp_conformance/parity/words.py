"""Differences in words: two numbers, two tensors, two settings."""

from __future__ import annotations

from fsdp_conformance.parity.noise import relative
from fsdp_conformance.recordings.fingerprint import Whole


def instead(value: float, wanted: float) -> str:
    """Two numbers, with as many digits as it takes to tell them apart."""
    digits = next((digits for digits in (6, 9, 12) if f"{value:.{digits}g}" != f"{wanted:.{digits}g}"), 17)
    return f"{value:.{digits}g} instead of {wanted:.{digits}g}"


def size_of_difference(value: Whole, wanted: Whole, bound: float | None = None) -> str:
    """How far a tensor is from the expected one."""
    if value.dtype != wanted.dtype:
        return f"{value.dtype} instead of {wanted.dtype}"
    if value.shape != wanted.shape:
        return f"shape {list(value.shape)} instead of {list(wanted.shape)}"
    if value.nonfinite != wanted.nonfinite:
        return f"{value.nonfinite} infinite or NaN elements instead of {wanted.nonfinite}"
    limit = f" (rounding explains {bound:.2g})" if bound is not None else ""
    # A part of a tensor can change while its norm stays the same.
    norms = f"{value.norm:.6g}", f"{wanted.norm:.6g}"
    norm = f"norm {norms[0]} instead of {norms[1]}" if norms[0] != norms[1] else f"norm {norms[0]} in both"
    return f"relative difference {relative(value, wanted):.2g}{limit} · {norm}"


def scaled(value: Whole, wanted: Whole) -> str:
    """The factor between two tensors; empty if it is 1."""
    factor = f"{value.norm / wanted.norm:.4g}" if wanted.norm else "1"
    return f"scaled by {factor}" if factor != "1" else ""


def number_of_tensors(count: int, total: int) -> tuple[str, ...]:
    """Evidence: how many tensors differ."""
    return (f"{count} of {total} tensors differ",)


def short(value: object) -> str:
    """A setting, short."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def both_settings(value: object, wanted: object) -> str:
    """A setting and the expected one."""
    if isinstance(value, float) and isinstance(wanted, float):
        return instead(value, wanted)
    return f"{short(value)} instead of {short(wanted)}"


def why_scaled(difference: str, ranks: int) -> str:
    """The likely cause of a setting that is a multiple of the expected one; empty if it is none."""
    words = difference.split()
    try:
        ratio = float(words[2]) / float(words[-1])
    except (ValueError, IndexError, ZeroDivisionError):
        return ""
    if ranks > 1 and abs(ratio - ranks) < 1e-6 * ranks:
        return "it is scaled by the number of ranks"
    if ranks > 1 and abs(ratio - 1 / ranks) < 1e-6:
        return "it is divided by the number of ranks"
    return ""


def of_own_optimizer(optimizer: str, defined: str, likely: str) -> str:
    """The likely cause of an update by a class that is neither torch's nor the engine's."""
    more = f"; {likely}" if likely else ""
    return (
        f"the optimizer's class {optimizer}, defined at {defined}, computes something over a shard, such as a norm or "
        f"a mean of each tensor, which must be combined over the ranks{more}"
    )
