"""
The bundled adapters.

    reference           the reference engine, fully sharded
    reference_data_parallel
                        the reference engine's data-parallel mode
    reference_components
                        the reference engine's components
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

What several of them share:

    torch_checkpoints   TorchCheckpoints: state dicts and checkpoints with torch's own functions
    torch_calls         the calls of torch's engines that these make, as source
    real_ranks          refusals of engines that need processes
    stub_cuda           CUDA's streams and events for engines that use them on the CPU, too
"""
