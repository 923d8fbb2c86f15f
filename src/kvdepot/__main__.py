"""`python -m kvdepot`: the command line where nothing was installed."""

import sys

from kvdepot.cli.main import main

sys.exit(main())
