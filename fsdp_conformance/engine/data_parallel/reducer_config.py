"""How a reducer is to reduce."""

from __future__ import annotations

from dataclasses import dataclass

from fsdp_conformance.engine.bucketing.bucket_assignment import DEFAULT_LIMITS
from fsdp_conformance.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ReducerConfig:
    """How gradients are reduced. Equal on every rank."""

    bucket_limits: tuple[int, ...] = DEFAULT_LIMITS
    """Bytes at which the first, second, ... bucket is closed; the last repeats."""
    find_unused_parameters: bool = False
    """Parameters may take no part in a forward, on some ranks or on all."""
    gradient_as_bucket_view: bool = False
    """Gradients are views into buckets that live as long as the reducer."""
    static_graph: bool = False
    """
    Every iteration has the graph of the first one: which parameters are used, and how often each gets a gradient, is
    learnt there. Needed where a parameter gets several gradients in one backward (reentrant checkpointing).
    """

    def __post_init__(self) -> None:
        if not self.bucket_limits or min(self.bucket_limits) < 0:
            raise ConfigError(
                [f"bucket_limits={self.bucket_limits}, but should be one or more numbers of bytes, none negative"],
                where="ReducerConfig",
            )
