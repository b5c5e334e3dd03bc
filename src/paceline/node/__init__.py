"""What runs on a node: agent, fork server, coordinator, log files. Standard library only, Python 3.9 or newer."""

import os

ENTRY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")  # what every process of a node runs
