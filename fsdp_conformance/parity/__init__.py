"""
Two recordings of a training, compared: where does one first leave the other, and whose fault is it? No torch.

    runs             a recording by steps, with whole tensors added up from the ranks' parts
    noise            how far apart rounding alone may take two trainings
    finding          a difference, with its evidence
    result           what a comparison has found
    bounds           the tensors of a step against the bounds of rounding
    models           how two models begin, and what their optimizers have
    units            the sharded units that parameters belong to
    norms            the norm of gradients, and how a wrong one was made
    updates          the optimizer's part of a step
    settings         the settings of the optimizer that differ
    same_names       the same names for the parameters of two recordings
    samples          what the ranks were given
    precision        gradients that are less precise than a script asks for
    gradients        the likely cause of a gradient that differs
    changed          what the script does to gradients between the backward and the step
    forwards         the forwards of a failed run that only some of its ranks ran
    alone            what is suspicious in one recording by itself
    vacuous          runs that would be equal whatever the engine does
    collectives      the collectives of two runs, as evidence
    kept             tensors that both sides keep when they run again, and what their elements show
    words            differences in words
    arbitration      whose a difference from another script is, from a run of the script without its sharding
    comparison       all steps of two recordings, in the order in which a step computes
    trajectory       every tensor over all steps
    text             the comparison for a terminal
    assertion        the comparison for a test
"""
