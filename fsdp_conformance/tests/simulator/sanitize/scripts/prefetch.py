"""
Batches copied ahead on a side stream, as data prefetchers do; each of its waits can be left out.

    torchrun --nproc-per-node 2 prefetch.py --without wait_stream
"""

import argparse
import os
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]


class Prefetcher:
    """Copies the next batch while the current one is computed on."""

    def __init__(self, loader: DataLoader[tuple[torch.Tensor, ...]], device: torch.device, without: str) -> None:
        self.loader = loader
        self.device = device
        self.without = without
        self.stream = torch.cuda.Stream()

    def copied(self, batch: Batch) -> Batch:
        """The batch on the device; the copies run on the side stream."""
        with torch.cuda.stream(self.stream):
            inputs = batch[0].to(self.device, non_blocking=True)
            targets = batch[1].to(self.device, non_blocking=True)
            inputs = inputs * 2 - 1
        return inputs, targets

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        following = self.copied(next(batches))
        for batch in batches:
            if self.without != "wait_stream":
                torch.cuda.current_stream().wait_stream(self.stream)
            inputs, targets = following
            if self.without != "record_stream":
                inputs.record_stream(torch.cuda.current_stream())
                targets.record_stream(torch.cuda.current_stream())
            following = self.copied(batch)
            yield inputs, targets


def main() -> None:
    """Train for an epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--without", choices=("nothing", "wait_stream", "record_stream"), default="nothing")
    args = parser.parse_args()

    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(dist.get_rank())
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 3, (24,)))
    loader = DataLoader(data, batch_size=4, pin_memory=True)
    model = DistributedDataParallel(nn.Linear(8, 3).to(device), device_ids=[device.index])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in Prefetcher(loader, device, args.without):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del inputs, targets
    print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
