"""
The pages in docs/ and the README: what is generated on them, and whether their blocks are true.

    blocks       the fenced blocks of a page, with what the comment before each one says about it
    generated    the parts that are written from the contract and from the code
    scoreboard   the page with every requirement and what runs show of it
    site         the same pages as a static site, with more of the stored verdicts: `ci/site`
    transcript   runs a page's commands in a fresh directory and compares their output with the quoted one
    __main__     `ci/docs`: check the pages, or bring them up to date

Tests in fsdp_conformance/tests/docs hold the pages to this.
"""
