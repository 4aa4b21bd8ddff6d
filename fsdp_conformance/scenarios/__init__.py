"""
The scenario space: what a training with a sharded engine can consist of, and lists that cover every combination of two.

    space      axes, values, which values exclude each other, and whether an assignment is possible
    axes       the axes themselves, as data
    conflicts  which of their values cannot be together, with reasons
    covering   rows that cover every pair (or triple) of values, extended and adapted
    scenario   a choice of values and a salt: its digest, and its JSON form
    rows       the frozen rows of the pair profile
    fresh      scenarios that are drawn for one run alone

Standard library only. `explore.building` makes a model, a plan and a schedule of a scenario.
"""
