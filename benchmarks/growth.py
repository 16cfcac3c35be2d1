"""`treegraft bench growth` from a clone; options: python benchmarks/growth.py --help"""

from __future__ import annotations

import sys

from treegraft.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "growth"]
    main()
