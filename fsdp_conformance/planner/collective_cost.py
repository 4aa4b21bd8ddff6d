"""
What a collective along a mesh axis takes, in microseconds: alpha-beta costs of the ring algorithms.

With n ranks a ring all-gather or reduce-scatter makes n - 1 hops and sends (n - 1) / n of the whole tensor; an
all-reduce is one after the other in a single collective: twice the hops and bytes, one start-up. An axis of one rank
communicates nothing. Uneven shards are padded on the wire; the padding is not counted.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH (2005); torch's
`tensor/_collective_utils.py` has the same formulas with constants of its own.
"""

from __future__ import annotations

from fsdp_conformance.planner.link_spec import LinkedAxis


def all_gather_us(nbytes: float, axis: LinkedAxis) -> float:
    """`nbytes`: of the gathered tensor, all shards together."""
    return _ring_us(nbytes, axis, num_passes=1)


def reduce_scatter_us(nbytes: float, axis: LinkedAxis) -> float:
    """`nbytes`: of the tensor that each rank gives in, of which it gets one shard back."""
    return _ring_us(nbytes, axis, num_passes=1)


def all_reduce_us(nbytes: float, axis: LinkedAxis) -> float:
    """`nbytes`: of the tensor that each rank gives in, and gets back reduced."""
    return _ring_us(nbytes, axis, num_passes=2)


def all_to_all_us(nbytes: float, axis: LinkedAxis) -> float:
    """
    `nbytes`: of the tensor that each rank gives in, one n-th for each rank.

    By pairwise exchange: n - 1 messages, and each rank keeps its own part.
    """
    return _ring_us(nbytes, axis, num_passes=1)


def _ring_us(nbytes: float, axis: LinkedAxis, *, num_passes: int) -> float:
    hops = num_passes * (axis.num_ranks - 1)
    if not hops:
        return 0.0
    link = axis.link
    return link.launch_us + hops * link.latency_us + link.wire_us(nbytes * hops / axis.num_ranks)
