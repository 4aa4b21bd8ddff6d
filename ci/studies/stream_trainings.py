"""
Trainings of torch's engines that together execute every synchronisation of DDP, FSDP1 and FSDP2 in training.

A training is data: an engine, a model, a mesh, and words for everything else. `stream_engines` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: The words that each engine understands; `Training` rejects others.
WORDS = {
    "ddp": frozenset(
        {
            "fp16-hook",
            "bucket-views",
            "device-ids",
            "find-unused",
            "inputs-elsewhere",
            "join",
            "many-buckets",
            "mixed-precision",
            "no-sync",
            "optimizer-in-backward",
            "optimizer-overlap",
            "power-sgd",
            "side-stream",
            "static-graph",
            "two-forwards",
        }
    ),
    "fsdp1": frozenset(
        {
            "bf16",
            "bf16-hook",
            "bf16-reduce",
            "eval-between",
            "forward-prefetch",
            "full-precision-eval",
            "grad-op",
            "grad-scaler",
            "hybrid",
            "hybrid-grad-op",
            "last-gradient-only",
            "no-backward-prefetch",
            "no-limiter",
            "no-shard",
            "no-sync",
            "optimizer-in-backward",
            "original-parameters",
            "post-backward-prefetch",
            "side-stream",
            "state-dict",
            "summon",
            "two-forwards",
            "unshard-ahead",
        }
    ),
    "fsdp2": frozenset(
        {
            "all-reduce-hook",
            "async-unshard",
            "backward-prefetch",
            "bf16",
            "bf16-params",
            "bf16-reduce",
            "deferred-all-reduce",
            "deferred-wait",
            "eval-between",
            "extra-prefetch",
            "failing-forward",
            "forward-prefetch",
            "grouped-head",
            "no-reshard",
            "no-reshard-after-backward",
            "no-sync",
            "optimizer-in-backward",
            "post-optimizer-event",
            "process-group-memory",
            "replicate",
            "reshard-to-2",
            "root-reshard",
            "separate-reduce-scatter-group",
            "shard-dim-1",
            "side-stream",
            "state-dict",
            "sum-only",
            "two-forwards",
            "two-input-buffers",
            "two-meshes",
            "unshard-ahead",
        }
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """One configuration."""

    name: str
    """Unique; starts with the engine."""
    model: str = "blocks"
    """Key of `stream_models.MODELS`."""
    init: str = "before"
    """When the model is moved to the device: before or after the engine wraps it, or never, because the engine moves it
    or because it is made on meta ("meta")."""
    mesh: tuple[int, ...] = (2,)
    """The numbers of ranks; of two dimensions, the first replicates and the second shards."""
    optimizer: str = "sgd"
    """sgd (with momentum) or adamw."""
    micro_batches: int = 1
    clip: float | None = None
    """The norm to which gradients are clipped."""
    checkpoint: str = ""
    """Activation checkpointing "inside" or "outside" each unit."""
    offload: str = ""
    """CPU offload of parameters and gradients: "pinned" or "pageable"."""
    words: frozenset[str] = field(default_factory=frozenset)
    """A subset of WORDS."""
    steps: int = 2
    reference: str = ""
    """A training with the same results that the CPU can run, if it cannot run this one."""

    def __post_init__(self) -> None:
        unknown = self.words - WORDS[self.engine]
        if unknown:
            raise ValueError(f"words must be known to {self.engine}, got {sorted(unknown)} [{self.name}]")

    @property
    def engine(self) -> str:
        """ddp, fsdp1 or fsdp2."""
        return self.name.partition("-")[0]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        size = 1
        for dimension in self.mesh:
            size *= dimension
        return size

    def __contains__(self, word: str) -> bool:
        return word in self.words


def _of(engine: str, *entries: tuple[str, dict[str, object]]) -> list[Training]:
    trainings = []
    for name, given in entries:
        options = dict(given)
        words = frozenset(str(options.pop("words", "")).split())
        trainings.append(Training(name=f"{engine}-{name}", words=words, **options))  # type: ignore[arg-type]
    return trainings


# In its second step DDP makes the host wait, to rebuild the buckets: only later steps show what that hides.
DDP = _of(
    "ddp",
    ("before", {}),
    ("device-ids", {"words": "device-ids"}),
    ("inputs-elsewhere", {"words": "device-ids inputs-elsewhere", "steps": 4}),
    ("bucket-views", {"words": "bucket-views many-buckets"}),
    ("static-graph", {"words": "static-graph many-buckets"}),
    ("find-unused", {"words": "find-unused many-buckets", "model": "conditional"}),
    ("many-buckets-adamw", {"words": "many-buckets", "optimizer": "adamw"}),
    ("buffers", {"model": "buffers"}),
    ("no-sync", {"micro_batches": 3, "words": "no-sync many-buckets"}),
    ("accumulation", {"micro_batches": 2, "words": "many-buckets"}),
    ("fp16-hook", {"words": "fp16-hook many-buckets", "steps": 4}),
    ("power-sgd", {"words": "power-sgd", "steps": 4}),
    (
        "optimizer-in-backward",
        {"words": "optimizer-in-backward many-buckets", "steps": 4, "reference": "ddp-four-steps"},
    ),
    ("four-steps", {"words": "many-buckets", "steps": 4}),
    ("optimizer-overlap", {"words": "optimizer-overlap many-buckets", "steps": 4}),
    ("two-forwards", {"words": "two-forwards find-unused"}),
    ("checkpoint", {"checkpoint": "inside", "words": "many-buckets"}),
    ("clip", {"clip": 0.1, "words": "many-buckets"}),
    ("tied", {"model": "tied", "words": "many-buckets"}),
    ("frozen", {"model": "frozen", "words": "many-buckets"}),
    ("transformer", {"model": "transformer", "words": "many-buckets", "optimizer": "adamw"}),
    ("conv", {"model": "conv", "words": "many-buckets"}),
    ("side-stream", {"words": "side-stream many-buckets"}),
    ("join", {"words": "join many-buckets"}),
    ("four-ranks", {"mesh": (4,), "words": "many-buckets"}),
)

FSDP1 = _of(
    "fsdp1",
    ("before", {}),
    ("after", {"init": "after"}),
    ("never", {"init": "never"}),
    ("original-parameters", {"words": "original-parameters", "optimizer": "adamw"}),
    ("grad-op", {"words": "grad-op"}),
    ("no-shard", {"words": "no-shard"}),
    ("hybrid", {"words": "hybrid", "mesh": (2, 2)}),
    ("hybrid-grad-op", {"words": "hybrid-grad-op", "mesh": (2, 2)}),
    ("hybrid-bf16", {"words": "hybrid bf16", "mesh": (2, 2)}),
    ("hybrid-accumulation", {"words": "hybrid", "mesh": (2, 2), "micro_batches": 2}),
    ("hybrid-no-sync", {"words": "hybrid no-sync", "mesh": (2, 2), "micro_batches": 2}),
    ("offload", {"offload": "pinned"}),
    ("offload-never", {"offload": "pinned", "init": "never"}),
    ("offload-bf16", {"offload": "pinned", "words": "bf16"}),
    # As FSDP1 documents, outside no_sync() an offloaded gradient overwrites the accumulated one.
    ("offload-accumulation", {"offload": "pinned", "micro_batches": 2, "reference": "fsdp1-last-gradient-only"}),
    ("offload-no-sync", {"offload": "pinned", "words": "no-sync", "micro_batches": 2}),
    ("offload-no-shard", {"offload": "pinned", "words": "no-shard forward-prefetch"}),
    ("offload-clip-adamw", {"offload": "pinned", "clip": 0.1, "optimizer": "adamw"}),
    ("offload-hybrid", {"offload": "pinned", "words": "hybrid", "mesh": (2, 2)}),
    ("bf16", {"words": "bf16"}),
    ("bf16-reduce", {"words": "bf16-reduce"}),
    ("bf16-no-shard", {"words": "bf16 no-shard"}),
    ("bf16-eval", {"words": "bf16 full-precision-eval eval-between"}),
    ("bf16-hook", {"words": "bf16-hook", "reference": "fsdp1-bf16-reduce"}),
    ("forward-prefetch", {"words": "forward-prefetch", "steps": 3}),
    ("post-backward-prefetch", {"words": "post-backward-prefetch"}),
    ("no-backward-prefetch", {"words": "no-backward-prefetch"}),
    ("no-limiter", {"words": "no-limiter"}),
    ("no-sync", {"words": "no-sync", "micro_batches": 3}),
    ("accumulation", {"micro_batches": 2}),
    ("last-gradient-only", {"words": "last-gradient-only", "micro_batches": 2}),
    ("grad-op-no-sync", {"words": "grad-op no-sync", "micro_batches": 2}),
    ("checkpoint-inside", {"checkpoint": "inside"}),
    ("checkpoint-outside", {"checkpoint": "outside"}),
    ("clip", {"clip": 0.1}),
    ("tied", {"model": "tied"}),
    ("transformer-adamw", {"model": "transformer", "optimizer": "adamw", "words": "original-parameters"}),
    ("optimizer-in-backward", {"words": "optimizer-in-backward original-parameters"}),
    ("two-forwards", {"words": "two-forwards"}),
    ("recurrent", {"model": "recurrent"}),
    ("frozen", {"model": "frozen"}),
    ("uneven", {"model": "uneven"}),
    ("grad-scaler", {"words": "grad-scaler bf16"}),
    ("unshard-ahead", {"words": "unshard-ahead", "steps": 3}),
    ("eval-between", {"words": "eval-between"}),
    ("summon", {"words": "summon", "steps": 3}),
    ("state-dict", {"words": "state-dict", "steps": 3}),
    ("side-stream", {"words": "side-stream"}),
    ("four-ranks", {"mesh": (4,)}),
)

FSDP2 = _of(
    "fsdp2",
    ("before", {}),
    ("after", {"init": "after"}),
    ("never", {"init": "never"}),
    ("meta", {"init": "meta"}),
    ("adamw", {"optimizer": "adamw"}),
    ("no-reshard", {"words": "no-reshard"}),
    ("root-reshard", {"words": "root-reshard"}),
    ("reshard-to-2", {"words": "reshard-to-2", "mesh": (4,)}),
    ("hybrid", {"mesh": (2, 2)}),
    ("hybrid-two-ranks", {"mesh": (2, 1)}),
    ("hybrid-bf16", {"mesh": (2, 2), "words": "bf16"}),
    ("hybrid-deferred", {"mesh": (2, 2), "micro_batches": 2, "words": "deferred-all-reduce"}),
    ("replicate", {"words": "replicate"}),
    ("offload-pinned", {"offload": "pinned"}),
    ("offload-pageable", {"offload": "pageable"}),
    ("offload-bf16", {"offload": "pinned", "words": "bf16-params"}),
    ("offload-never", {"offload": "pinned", "init": "never"}),
    ("offload-accumulation", {"offload": "pinned", "micro_batches": 2}),
    ("offload-clip-adamw", {"offload": "pinned", "clip": 0.1, "optimizer": "adamw"}),
    ("offload-in-backward", {"offload": "pinned", "words": "optimizer-in-backward"}),
    ("offload-hybrid", {"offload": "pinned", "mesh": (2, 2)}),
    ("bf16", {"words": "bf16"}),
    ("bf16-params", {"words": "bf16-params"}),
    ("bf16-reduce", {"words": "bf16-reduce"}),
    ("bf16-no-sync", {"words": "bf16-params no-sync", "micro_batches": 3}),
    ("forward-prefetch", {"words": "forward-prefetch"}),
    ("backward-prefetch", {"words": "backward-prefetch"}),
    ("both-prefetch", {"words": "forward-prefetch backward-prefetch"}),
    ("extra-prefetch", {"words": "extra-prefetch", "model": "conditional"}),
    ("async-unshard", {"words": "async-unshard"}),
    ("async-prefetch", {"words": "async-unshard forward-prefetch backward-prefetch"}),
    ("unshard-ahead", {"words": "unshard-ahead"}),
    ("no-sync", {"words": "no-sync", "micro_batches": 3}),
    ("accumulation", {"micro_batches": 2}),
    ("deferred-wait", {"words": "deferred-wait", "micro_batches": 2}),
    ("no-reshard-after-backward", {"words": "no-sync no-reshard-after-backward", "micro_batches": 2}),
    ("checkpoint-inside", {"checkpoint": "inside"}),
    ("checkpoint-outside", {"checkpoint": "outside"}),
    ("clip", {"clip": 0.1}),
    ("tied", {"model": "tied"}),
    ("transformer-adamw", {"model": "transformer", "optimizer": "adamw"}),
    ("optimizer-in-backward", {"words": "optimizer-in-backward"}),
    ("two-forwards", {"words": "two-forwards"}),
    ("recurrent", {"model": "recurrent"}),
    ("frozen", {"model": "frozen"}),
    ("uneven", {"model": "uneven"}),
    ("shard-dim-1", {"words": "shard-dim-1"}),
    ("grouped-head", {"words": "grouped-head", "model": "features"}),
    ("failing-forward", {"words": "failing-forward", "steps": 3}),
    ("all-reduce-hook", {"words": "all-reduce-hook"}),
    ("two-input-buffers", {"words": "two-input-buffers"}),
    ("post-optimizer-event", {"words": "post-optimizer-event", "steps": 3}),
    ("process-group-memory", {"words": "process-group-memory"}),
    ("separate-groups", {"words": "separate-reduce-scatter-group"}),
    ("sum-only", {"words": "sum-only"}),
    ("two-meshes", {"words": "two-meshes"}),
    ("eval-between", {"words": "eval-between"}),
    ("state-dict", {"words": "state-dict", "steps": 3}),
    ("side-stream", {"words": "side-stream"}),
    ("conv", {"model": "conv"}),
    ("four-ranks", {"mesh": (4,)}),
    ("four-ranks-checkpoint-bf16", {"mesh": (4,), "checkpoint": "inside", "words": "bf16-params"}),
)

TRAININGS: dict[str, Training] = {training.name: training for training in (*DDP, *FSDP1, *FSDP2)}

#: Configurations in which torch (2.13) itself races; the other studies leave them out.
RACING: dict[str, Training] = {
    training.name: training
    for training in (
        *_of("ddp", ("mixed-precision", {"words": "mixed-precision many-buckets", "steps": 4})),
        *_of("fsdp1", ("offload-grad-scaler", {"words": "grad-scaler", "offload": "pinned"})),
    )
}
