import sys
from pathlib import Path

# `benchmarks` is a folder of the repository, not a part of the package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
