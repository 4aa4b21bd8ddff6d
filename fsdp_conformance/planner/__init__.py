"""
The planner: prices every way to shard a model on a cluster and chooses the fastest that fits.

    planner              the ways to shard, compared; the decision
    plan_model           a model, built on meta, cut into units and counted
    plan_step            the time and the peak memory of a training step
    plan_text            the decision in words

    device_spec          what a device computes and holds
    link_spec            what a link costs (alpha-beta model), and collectives on it
    link_fit             the links of a machine, from timed collectives
    redistribution_cost  the cost of moving a tensor from one mesh layout to another
"""
