"""
Ranks that are processes: forked from a warm server, supervised, ended by pid.

    launcher             starts the ranks of one case, or reuses those of the last one (never for a certificate)
    rank_set             the processes of a case, and those kept for the next one
    prepared             ranks that get ready for the next case while this one runs
    supervisor           watches them, releases them together, terminates those that hang
    rank_process         a rank's process, from its first line to its last
    forkserver           the warm server that ranks are forked from
    priority             how the kernel schedules the processes of a run
    preload              what the server imports before the first fork
    cuda_driver          whether the CUDA driver runs here, and how many GPUs it knows, without starting it
    cuda_imports         a server without the modules that start CUDA when they are imported
    mailbox              messages between the controller and a rank
    foreground           the terminal, for one rank that is debugged
    stacks               the stacks, last collectives and state of a stuck rank, read from outside
    leftovers            removes shared memory that killed ranks leave behind
    socket_directory     a directory with a path short enough for sockets

This file imports nothing: the controller uses `preload` and `cuda_driver` before it wants torch.
"""
