"""Lets `python -m ark` do what the `ark` command does."""

import sys

from ark.cli import main

sys.exit(main())
