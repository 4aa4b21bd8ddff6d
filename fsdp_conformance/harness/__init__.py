"""
Ranks: starting them warm, watching them, ending them.

This module imports nothing, so that `harness.preload`, `harness.deadlines` and `harness.attribution` stay free of
torch.
"""
