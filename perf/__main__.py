"""`python -m perf`."""

import sys

from perf.command import main

sys.exit(main())
