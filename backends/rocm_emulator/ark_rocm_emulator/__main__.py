"""`python -m ark_rocm_emulator`: the command `ark-rocm-emulator`."""

import sys

from ark_rocm_emulator.command import main

sys.exit(main())
