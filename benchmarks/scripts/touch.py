"""Make the empty file that argv[1] names."""

import pathlib
import sys

pathlib.Path(sys.argv[1]).touch()
