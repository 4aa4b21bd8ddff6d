"""The conformance suite for sharded data-parallel training in PyTorch, and the reference engine that it certifies."""

__version__ = "2026.11.0"
