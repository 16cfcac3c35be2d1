"""`treegraft bench whole` from a clone; options: python benchmarks/whole.py --help"""

from __future__ import annotations

import sys

from treegraft.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["bench", "whole"]
    main()
