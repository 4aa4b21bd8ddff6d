"""
Programs on a real device, under the checker: torch's tracing hooks say what happens, and the checker what it means.

    operators      the tensors that an operator reads and writes
    trace          the events of the hooks, as lanes, waits and accesses of the checker
    hooks          calls the trace for each event and each operator
    devices        where the program is now: on CUDA
"""
