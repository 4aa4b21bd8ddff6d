"""
`explore`: draw models, configurations and schedules at random, and shrink what fails.

    example       everything that one run needs, as frozen data with a JSON form; what it exercises, in words
    strategies    what is drawn, for an engine that declares certain flags (needs Hypothesis)
    references    the references of an example, trained once for all ranks
    case          one example as a case, judged by the oracles of the suites
    worker        the warm process that runs examples on simulated ranks
    pool          its controller: what came of an example, also if the engine crashed or hung
    signature     what makes two failures the same one
    simplify      simpler examples than a given one
    exploration   draw, run, shrink, leave out what is known, go on (needs Hypothesis)
    summary       failures as text, and the script that shows a failure
    counting      what an exploration did, as text
    saved         a failure as a test file in a user's repository
"""
