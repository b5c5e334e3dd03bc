"""Does nothing, for the number of seconds in argv[1]."""

import sys
import threading

if len(sys.argv) > 1:
    threading.Event().wait(float(sys.argv[1]))
