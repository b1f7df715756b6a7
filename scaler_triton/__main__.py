"""`python -m scaler_triton`."""

import sys

from scaler_triton.cli import main

sys.exit(main())
