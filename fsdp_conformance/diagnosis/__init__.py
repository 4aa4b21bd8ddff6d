"""
From a wrong value to its likely cause, and from many findings to the one that says most.

    evidence           a tensor that differs, with all that may explain it
    causes             the likely cause of a difference, from its pattern
    places             right values in wrong places, for `causes`
    mistakes           a step with one mistake in it, for `causes`
    optimizer_steps    a step of the whole model with a wrong state or wrong settings, for `causes` as well
    saved_state        the likely cause of a wrong value in a state dict or a checkpoint
    amounts            the likely cause of a wrong number of bytes (standard library only)
    headline           which finding of a case says most (standard library only)
    severity           how much a failure harms a user's training (standard library only)
    grouping           failures that have one cause (standard library only)
    advice             where to look for the defect behind a finding (standard library only)
"""
