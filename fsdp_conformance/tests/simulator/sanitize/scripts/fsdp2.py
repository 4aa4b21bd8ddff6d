"""
FSDP2 as in PyTorch's tutorial: a transformer, a mesh, mixed precision, explicit prefetching, a distributed checkpoint.

    torchrun --nproc-per-node 2 fsdp2.py --mixed-precision --explicit-prefetching --dcp checkpoint
"""

import argparse
import itertools
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCABULARY = 32


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Batch x length x dim to the same."""
        batch, length, dim = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts.unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return x + torch.as_tensor(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Embeddings, blocks, an output layer."""

    def __init__(self, dim: int = 16, heads: int = 2, num_layers: int = 3) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Batch x length to batch x length x vocabulary."""
        x = self.embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return torch.as_tensor(self.output(self.norm(x)))


def set_modules_to_prefetch(model: Transformer) -> None:
    """Each block asks for the next one early."""
    layers = [layer for layer in model.layers if isinstance(layer, FSDPModule)]
    for layer, following in itertools.pairwise(layers):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])


def main() -> None:
    """Train for a few steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--explicit-prefetching", action="store_true")
    parser.add_argument("--dcp")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()

    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}")
    torch.cuda.set_device(device)
    dist.init_process_group(backend="nccl", device_id=device)
    torch.manual_seed(0)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = Transformer()
    kwargs: dict[str, Any] = {"mesh": mesh}
    if args.mixed_precision:
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    if args.explicit_prefetching:
        set_modules_to_prefetch(model)
    model.to_empty(device="cuda")
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
            module.reset_parameters()
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        tokens = torch.randint(0, VOCABULARY, (4, 8), device=device)
        loss = model(tokens).float().logsumexp(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optim.step()
        optim.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")

    if args.dcp:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=args.dcp)  # type: ignore[attr-defined]
        restored = {"model": get_model_state_dict(model)}
        dcp.load(restored, checkpoint_id=args.dcp)  # type: ignore[attr-defined]
        set_model_state_dict(model, restored["model"])
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        assert all(isinstance(tensor, torch.Tensor) and not tensor.is_cuda for tensor in full.values())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
