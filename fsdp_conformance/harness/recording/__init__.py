"""
Recording collectives at the process group.

    process_group        process groups that record every collective and change nothing else
    gloo_on_devices      the collectives that gloo lacks for tensors on an accelerator
    collective_calls     what a call means: the collective, its tensors, its bytes
    collective_log       what a rank issued, in which phase, from which line
    collective_trace     the last collectives in a small file, to be read when the rank is stuck or dead
    call_site            the line that called a collective
"""
