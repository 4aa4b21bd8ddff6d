"""
Records a training run from inside its processes, without an edit to the script, without communication, and without a
change to what it computes.

    startup         the directory in which Python finds it at its start
    settings        what is recorded, and where, as an environment variable
    process         begins in a process that has the variables for it, when torch has been imported
    observer        what is recorded, and when
    steps           the steps of optimizers that run at the moment
    hooks           the places in torch where a training loop is seen
    guard           keeps errors of all this out of the training
    changes         where the script changes gradients after a backward, and parameters between steps
    gradient_hooks  hooks of the script that see gradients
    lines           lines of the script, as they are shown
    names           parameters by the names that the unsharded model gives them, outputs by their places
    named           tensors by name, and their fingerprints
    unchanged       which tensors need no new fingerprint
    plain           numbers and settings of optimizers in terms of JSON
    rounded         float32 tensors that have only numbers of bfloat16
    rounded_inputs  inputs that mixed precision rounds although they are large
    in_use          parameters as modules compute with them, for a run that keeps their elements
    elements        the elements of a part of a tensor, kept as they are
    kept_elements   those of some tensors, in a run that is for them
    layouts         which elements of a parameter this rank holds
    shards          the parameters that an optimizer has, while modules hold gathered ones
    originals       parameters from before sharding that the script still holds
    deepspeed_engine, deepspeed_values
                    DeepSpeed's engine, which hides what each rank holds
    megatron        Megatron-FSDP, whose optimizer has other parameters than the modules
    traffic         the collectives that the process calls
    fingerprints    elements as a fingerprint
    random_state    the states of random number generators
    writer          the file of a rank

The same script with its sharding taken out, for comparison:

    unsharded       takes the place of torch's sharding functions
    megatron_unsharded
                    takes the place of Megatron-FSDP's functions
    flat_parameter  the flat parameter of an FSDP1 wrapper that was replaced
    replica         a module that is replicated: its gradients are averaged after each backward
    whole_batch     one batch for all ranks, as one process would train it
    rounding        computes a module in another dtype, as mixed precision does
"""
