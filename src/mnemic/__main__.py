"""`python -m mnemic` is the command line."""

import sys

from mnemic.cli import main

sys.exit(main())
