"""
The planner: prices every way to shard a model on a cluster and chooses the fastest that fits.

    planner              compares the candidates and decides
    plan_candidate       the ways to shard, and their common options
    plan_model           a user's model, built on meta and cut into units
    plan_forward         one forward on meta, counted: operations and bytes kept for backward
    plan_unit            what is known of each unit
    plan_step            the time of a step on two lanes, compute and communication
    plan_memory          the peak memory of a rank
    plan_text            the decision in words

    device_spec          what a device computes and holds
    link_spec            what a link costs (alpha-beta model)
    link_fit             fits a link to timed collectives
    collective_cost      the cost of one collective along a mesh axis
    redistribution_cost  the cost of moving a tensor from one mesh layout to another
"""
