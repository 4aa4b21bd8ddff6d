"""
From a wrong value to its likely cause, and from many findings to the one that says most.

    causes      the likely cause of a difference, from its pattern
    mistakes    what a step would have given with one mistake in it, for `causes`
    headline    which finding of a case says most (standard library only)
    grouping    failures that have one cause (standard library only)
    advice      where to look for the defect behind a finding (standard library only)
"""
