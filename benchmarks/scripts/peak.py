"""Run a command, and write its seconds and its peak memory in bytes to the file in the last argument."""

import json
import os
import sys
import time

*command, answer = sys.argv[1:]
began = time.monotonic()
pid = os.posix_spawnp(command[0], command, os.environ)
_, status, usage = os.wait4(pid, 0)
seconds = time.monotonic() - began
if status:
    sys.exit(f"{command[0]}: exit code {os.waitstatus_to_exitcode(status)}")
with open(answer, "w") as file:
    json.dump({"seconds": seconds, "bytes": usage.ru_maxrss * 1024}, file)
