"""
The trainings that implementation and references both run, as data.

    definition    a workload (model, batches, loss) and a regime (optimizer, steps, micro-batches, events)
    events        what happens between steps or inside one, and every point where it can
    units         which unit owns which parameter, and how large units are
    loading       the workload that a user names with --workload
"""
