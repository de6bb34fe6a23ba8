"""python -m int8moe_compile: the same as the command int8moe."""

from __future__ import annotations

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
