"""`python -m marfl`: the command line."""

import sys

from marfl.cli import main

sys.exit(main())
