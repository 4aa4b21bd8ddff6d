"""
Adapters: the protocol through which the suite drives an implementation, and those for bundled and known engines.

The protocol and its tools:

    base                Adapter: every method and class variable of the protocol
    components          protocols of the components that an adapter may provide
    torch_like          TorchAdapter: the base class for engines with a torch-like API
    names               original names of parameters and buffers below wrappers
    deferred            memory and values for models that were built on meta
    sharded             full tensors from shards and back
    gathering           full values of many sharded tensors with one all-gather
    registry            finds and describes the adapter for a name
    absent              engines that have no adapter, and why
    allowances          the most that an adapter may declare for itself
    validator           checks a class against the protocol
    optimizers          several optimizers of a user, passed to an engine as one
    structures          tensors inside models' inputs and outputs
    cuda_names          CUDA's names on the simulated accelerator, for engines that know no other
    vendors             the bundled adapters
"""
