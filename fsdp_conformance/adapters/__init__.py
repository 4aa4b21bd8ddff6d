"""
Adapters: the protocol through which the suite drives an implementation, and those for bundled and known engines.

The protocol and its tools:

    base                Adapter: every method and class variable of the protocol
    components          protocols of the components that an adapter may provide
    torch_like          TorchAdapter: the base class for engines with a torch-like API
    torch_checkpoints   TorchCheckpoints: state dicts and checkpoints with torch's own functions
    names               original names of parameters and buffers below wrappers
    deferred            memory and values for models that were built on meta
    real_ranks          refusals of engines that need processes
    sharded             full tensors from shards and back
    gathering           full values of many sharded tensors with one all-gather
    registry            finds and describes the adapter for a name
    absent              engines that have no adapter, and why
    validator           checks a class against the protocol
    smoke               tries an adapter out on two ranks

The training loop of the implementation under test:

    session             trains a workload through an adapter and records its history
    pipeline            a rank's place in a pipeline of stages
    pipeline_stage      a stage in torch's pipeline schedules
    optimizers          several optimizers of a user, passed to an engine as one
    structures          tensors inside models' inputs and outputs
    overlap             what each collective and each computation waits for, on the simulated accelerator
    watch               allocator statistics and the simulated accelerator's checker

Adapters:

    reference           the reference engine, fully sharded
    reference_data_parallel
                        the reference engine's data-parallel mode
    reference_components
                        the reference engine's components
    torch_calls         the calls of torch's engines that these make, as source
    torch_ddp           torch's DistributedDataParallel
    torch_fsdp1         torch's FullyShardedDataParallel and its sharding strategies
    torch_fsdp2         torch's fully_shard
    torch_zero1         torch's ZeroRedundancyOptimizer on top of DistributedDataParallel
    torch_replicate     torch's composable replicate
    torch_dtensor       DTensor's collectives, as a component
    deepspeed_zero      DeepSpeed ZeRO-1, 2 and 3
    fairscale_fsdp      FairScale's FullyShardedDataParallel
    megatron_fsdp       Megatron-FSDP with ZeRO-1, 2 and 3
    colossalai_zero     Colossal-AI's ZeRO-1 and 2
    simplefsdp          torchtitan's SimpleFSDP
    accelerate_fsdp     Accelerate's plugins for FSDP1 and FSDP2
    lightning_fsdp      Lightning Fabric's strategies for FSDP1 and FSDP2
    stub_cuda           CUDA's streams and events for engines that use them on the CPU, too
    cuda_names          CUDA's names on the simulated accelerator, for engines that know no other
"""
