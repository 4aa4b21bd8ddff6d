"""Which methods of a process group are recorded, and as what."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ProcessGroup

from fsdp_conformance.harness.recording.collective_calls import METHODS, traffic_of
from fsdp_conformance.history.collective import Op

#: What a process group has besides collectives, in all versions of torch since 2.6.
QUIET = {
    "BackendType", "_add_ephemeral_timeout", "_backend_id", "_device_types", "_enable_collectives_timing",
    "_end_coalescing", "_get_backend", "_get_backend_name", "_get_sequence_number_for_group", "_has_hooks", "_id",
    "_pybind11_conduit_v1_", "_register_backend", "_register_on_completion_hook", "_set_default_backend",
    "_set_group_desc", "_set_group_name", "_set_sequence_number_for_group", "_start_coalescing",
    "_wait_for_pending_works", "abort", "bound_device_id", "boxed", "get_backend", "get_group_store",
    "get_reconfigure_handle", "group_desc", "group_name", "merge_remote_group", "name", "new_window", "rank",
    "reconfigure", "register_abort_hook", "register_post_hook", "register_pre_hook", "set_timeout", "shutdown", "size",
    "split_group", "supports_abort_hooks", "supports_completion_hooks", "supports_reconfigure", "supports_window",
    "unbox", "unregister_abort_hook", "unregister_post_hook", "unregister_pre_hook", "use_pg_for_symm_mem_rendezvous",
}  # fmt: skip


def test_no_collective_of_this_torch_is_overlooked() -> None:
    """Every method that a new version of torch adds must be classified as communicating or not."""
    names = {name for name in dir(ProcessGroup) if not name.startswith("__") and not name.isupper()}

    assert set() == names - QUIET - set(METHODS), "add each to METHODS of collective_calls, or to QUIET here"


@pytest.mark.parametrize("name", ["gather_single", "gather_into_tensor"])
def test_every_rank_counts_a_gather_into_one_tensor_alike(name: str) -> None:
    """Only the root has room for all parts; the others pass an empty tensor."""
    mine = torch.ones(3)
    at_root, elsewhere = (traffic_of(name, (torch.empty(numel), mine, object()), {}, 4) for numel in (12, 0))

    assert (Op.GATHER, 48, "float32") == (at_root.op, at_root.nbytes, at_root.dtype)
    assert (at_root.op, at_root.nbytes) == (elsewhere.op, elsewhere.nbytes)
