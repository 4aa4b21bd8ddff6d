"""The states of random number generators, as hashes. Reading them changes nothing."""

from __future__ import annotations

import hashlib
import random
import sys

import torch


def random_states() -> dict[str, str]:
    """A hash of the state of each generator that this process uses: torch's, Python's, NumPy's, the devices'."""
    states: dict[str, bytes] = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "python": repr(random.getstate()).encode(),
    }
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        kind, words, *rest = numpy_random.get_state()
        states["numpy"] = kind.encode() + words.tobytes() + repr(rest).encode()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states["cuda"] = bytes(torch.cuda.get_rng_state().tolist())
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}
