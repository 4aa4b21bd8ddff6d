"""
A full optimizer state dict is gathered in the order of each rank's own optimizer (torch 2.13, gloo).

If ranks gave their optimizers the parameters in different orders, they gather different tensors at once: shapes that
fit are mixed up, and others end the process (gloo: SIGABRT).
"""

import tempfile

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard


def rank_main(rank: int, store: str) -> None:
    """Two parameters of one shape, whose optimizer state is 1 and 2; odd ranks list them in reverse."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    for child in model:
        fully_shard(child, mesh=dist.init_device_mesh("cpu", (2,)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters[::-1] if rank else parameters, lr=0.1, momentum=0.5)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))["state"]
    print(f"rank {rank}:", {name: entries["momentum_buffer"].tolist() for name, entries in state.items()}, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(rank_main, (f"{directory}/store",), nprocs=2)
    print("expected on every rank: 0.weight is 1 everywhere, 1.weight is 2 everywhere")
