"""What runs on a node: agent, fork server, coordinator, log files. Standard library only, Python 3.9 or newer."""

import os

_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(_here))
# What every process of a node runs: a file of this package, or the zip archive that the package is in.
ENTRY = _root if os.path.isfile(_root) else os.path.join(_here, "__main__.py")
