# mypy: ignore-errors
"""An adapter as a user writes one: torch's FSDP2 through its public API. Tests count its lines and run it."""

from contextlib import contextmanager

from fsdp_conformance.adapters.torch_like import TorchAdapter


class MyFSDP(TorchAdapter):
    name = "my-fsdp"
    capabilities = frozenset({"zero3", "zero2", "reshard_after_forward"})

    def wrap(self, model, plan):
        from torch.distributed.fsdp import fully_shard

        keep = plan.sharding == "grad_optim" or plan.reshard_after_forward is False
        for unit in plan.units:
            fully_shard(model.get_submodule(unit), reshard_after_forward=not keep)
        return fully_shard(model, reshard_after_forward=not keep)

    @contextmanager
    def no_sync(self):
        self.model.set_requires_gradient_sync(False)
        yield
        self.model.set_requires_gradient_sync(True)
