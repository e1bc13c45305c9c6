"""`python -m checkpointing` does all that `tune` does."""

import sys

from checkpointing.cli.main import main

sys.exit(main())
