"""`python -m whence` is the command line."""

import sys

from whence.cli import main

sys.exit(main())
