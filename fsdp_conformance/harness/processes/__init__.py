"""
Ranks that are processes: forked from a warm server, supervised, ended by pid.

    launcher             starts the ranks of one case
    supervisor           watches them, lets them go together, ends those that hang
    forkserver           the warm server that ranks are forked from
    preload              what the server imports before the first fork
    mailbox              messages between the controller and a rank
    stacks               the stacks, last collectives and state of a stuck rank
    leftovers            shared memory of killed ranks, and its removal
    rank_pool            ranks that are reused (never for a certificate)
    socket_directory     a directory with a path short enough for sockets

This module imports nothing: the warm server must not load torch by accident.
"""
