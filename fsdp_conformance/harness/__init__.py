"""
Ranks: starting them, watching them, ending them.

    testcase             `ShardedTrainingTestCase`, the base class of every case
    controller           its half in the controller: the start of the ranks, and the outcome
    torch_compat         the base classes of PyTorch's own distributed tests, on our ranks
    torch_testing        imports torch's test modules without starting CUDA
    probe                calls one function in one fresh process
    exact_collectives    checks that this machine can launch ranks and communicate exactly

    processes            ranks that are processes, forked from a warm server
    simulated_ranks      ranks that are threads of one process and take turns
    torchrun             ranks started by torchrun, on one host or several
    recording            the process group that records every collective

    order                what the controller tells the ranks of a case
    rank                 one case on one rank: run the body, report, wait for the goodbye
    observations         what a rank shows its referee, as data in a file
    context              what belongs to the rank that is running: its case and its log of collectives
    environment          variables, seeds, threads and determinism of a rank
    single_process_world  a world in which only this process exists
    rendezvous           makes ranks meet at a store of ours
    deadlines            the nested deadlines of a case
    accounting           whose code a rank runs, so that the suite's own work is not counted as the engine's
    devices              the devices of this machine, and how many cases fit on them
    leases               how many cases use a GPU at the same time
    device_memory        the memory of GPUs, without starting CUDA
    host_memory          the host memory that a process holds, whoever allocated it
    backend_trial        tries an accelerator's backend before anything is judged
    warm_up              makes a device's libraries allocate what they keep
    rank_startup         what a rank can do before it has a case: device, libraries, first group

Which rank failed first is decided in `outcome.endings`. This file imports nothing, so that `processes.preload` and
`deadlines` stay free of torch.
"""
