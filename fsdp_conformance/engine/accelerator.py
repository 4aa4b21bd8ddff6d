"""The accelerator of this machine."""

from __future__ import annotations

import torch


def present_accelerator() -> torch.device | None:
    """
    The accelerator's type, as a device without an index, or None if there is none.

    `torch.accelerator.current_accelerator` alone does not say that: without an accelerator, torch 2.6 raises, and later
    versions name the one that torch was built for.
    """
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
