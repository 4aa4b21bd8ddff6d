"""
DDP as in PyTorch's tutorial: torchrun's variables, NCCL, device_ids, and a checkpoint that rank 0 saves and all load.

    torchrun --nproc-per-node 2 ddp.py --checkpoint model.pt
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class ToyModel(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x 10 to batch x 5."""
        return torch.as_tensor(self.net2(self.relu(self.net1(x))))


def main() -> None:
    """Train for a few steps, save, load, and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    assert dist.get_backend() == "nccl"
    device = torch.device("cuda", rank % torch.cuda.device_count())
    assert device.type == "cuda"

    torch.manual_seed(0)
    model = ToyModel().to(device)
    assert next(model.parameters()).is_cuda
    ddp_model = DistributedDataParallel(model, device_ids=[device.index])
    loss_fn = nn.MSELoss()
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.001, momentum=0.9)
    for step in range(args.steps):
        optimizer.zero_grad()
        outputs = ddp_model(torch.randn(20, 10))
        labels = torch.randn(20, 5).to(rank)
        loss = loss_fn(outputs, labels)
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}")

    if rank == 0:
        torch.save(ddp_model.state_dict(), args.checkpoint)
    dist.barrier()
    map_location = {"cuda:0": f"cuda:{rank}"}
    loaded = torch.load(args.checkpoint, map_location=map_location, weights_only=True)
    for name, tensor in ddp_model.state_dict().items():
        assert loaded[name].device == tensor.device
        assert torch.equal(loaded[name], tensor), name
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
