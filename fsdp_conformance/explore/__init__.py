"""
`explore`: draw scenarios, in which many values meet, and shrink what fails.

    building      from a scenario to its model, plan and schedule
    example       these, as every rank builds them
    own_model     the user's own model in an example, and what it leaves out
    needs         the traffic that a step of an example needs at most
    references    the references of a scenario, trained once for all ranks
    case          a scenario as a case, judged by the oracles of the suites
    worker        the warm process that runs scenarios on simulated ranks
    pool          its controller: what came of a scenario, also if the engine crashed or hung
    signature     what makes two failures the same one
    exploration   draw, run, shrink, leave out what is known, go on
    shrinking     failing rows of the pair profile, shrunk when they fail
    summary       failures as text, and the script that shows a failure
    counting      what an exploration did, as text
    saved         a failure as a test file in a user's repository
    freeze        append rows to the pair profile, or make all of them again
    annealing     few rows with every possible pair
"""
