"""
What a run leaves: the run file, the certificate that follows from it, and the texts that people read.

Everything here is derived from records and from the contract, without torch: `verify` and `explain` read a run file
on any machine, and say what the run itself said.
"""
