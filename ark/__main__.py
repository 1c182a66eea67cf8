"""Makes `python -m ark` equivalent to the `ark` command."""

import sys

from ark.cli import main

sys.exit(main())
