"""
A failure as a script that does not need this package: for a bug report.

    capture     what a case's body trains and compares, found out without ranks
    sources     the source of a workload, with all that it uses
    workloads   a workload as its functions alone, which are all that a script calls
    smaller     their source without what other cases need
    loop        the training loop, with what the case does
    carried     the code of an adapter, for engines other than torch's three
    script      the script: the source, the engine's calls or its adapter's code, the training, the comparison
    refused     why a case or an adapter cannot be written as a script
"""
