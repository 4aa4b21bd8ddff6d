"""`python -m fsdp_conformance` is the command `fsdp-conformance`."""

import sys

from fsdp_conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
