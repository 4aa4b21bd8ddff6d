"""
The output of a run: the run file, the certificate that follows from it, and the texts that people read.

    runfile        the format: a line of JSON for each event, chained by hashes
    schema         its lines as types, and the JSON schema that follows from them
    run_content    the lines of a run file as types, and a whole file as it was read
    recorder       writes the run file while the run goes on
    last_run       where runs leave their files, and what the last one found
    unjudged       records of cases whose test ended without a verdict
    pairs          the pairs of values that a run covers
    certificate    what a run certifies, computed from its file and the profile
    verify         the certificate, derived again from a file
    signature      who vouches for a file
    folding        text folded to the width of the terminal
    terminal       findings and verdicts as plain text
    repeated       a case that was run again: what differs, and how often it failed
    explanation    a requirement or a case, with what a run found
    marked         text of others in Markdown, which cannot become markup
    markdown       a run as a Markdown page
    html           a run as one HTML file
    formats        a run in the formats that other programs read
    comparison     the verdicts that differ between two runs
    trend          stored runs in the order of their dates
    scoreboard_page  several engines side by side, requirement by requirement
    tally          what an engine's runs show of each case, small enough to keep
    coverage       the whole contract: what judges each requirement, who can be judged, what runs show
    expectations   known failures, and how a run differs from them
    expectation_writer  a list of them, written from a run
    baseline       a run next to an earlier one

Everything here works without torch, on records and the contract alone: `verify` and `explain` read a run file on any
machine, and arrive at what the run itself printed.
"""
