"""Does nothing, for as many seconds as it is told."""

import sys
import threading

if len(sys.argv) > 1:
    threading.Event().wait(float(sys.argv[1]))
