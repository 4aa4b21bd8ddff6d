"""
The fully sharded module: parameters, gradients and optimizer state of each unit are sharded over a group.

    wrapper              `FullyShardedDataParallel`, the class that users wrap a module in
    fully_shard          `fully_shard(module)`: the same without a wrapper, by hooks
    wrap_policy          which submodules become separate units

    schedule             when each unit is gathered, resharded and reduced
    unit                 a unit and its states during a training step
    boundary             the nodes of the graph where the backward of a unit begins and ends
    hooks                the module hooks that tell the schedule what runs
    deferral             no optimizer steps while gradients are deferred
    inputs               moving and casting a unit's inputs
    buffers              a unit's floating-point buffers under a precision policy
    order_watch          detects ranks that run different units, on accelerators

    flat_parameter       the parameters of one unit and dtype in one sharded storage
    shown_parameters     the objects that modules see: originals, or whole leaves
    gradient_reduction   from the leaves' gradients to those of the originals
    unit_spec            how a unit's parameters are stored, including after they move
    construction         from a module to a unit
    materialisation      parameters on the meta device get memory and values
    sharding_groups      the group to shard over and the group to replicate over

    full_parameters      `summon_full_params`
    optimizers           which optimizers may step shards
    gradient_norm        the norm of all gradients, and clipping by it
    gradient_scaler      a gradient scaler whose skipped steps agree across ranks
    model_state          state dicts of the module, full and sharded
    torch_spelling       options in the spelling of torch's own class
    torch_state_dicts    state dicts by the calls of torch's own class
    local_pieces         a rank's part of a tensor, as checkpoints have it
    optimizer_state      state dicts of the optimizer, full and sharded
    checkpoint           model and optimizer in a directory, for any number of ranks
    report               a summary of what each unit holds and sends
"""

from fsdp_conformance.engine.fully_sharded.wrapper import FullyShardedDataParallel

__all__ = ["FullyShardedDataParallel"]
