"""Warm servers: processes that have imported a framework and outlive a job, so that the next one starts at once.

`server` is such a process. It listens on a socket in a folder of its user (`folder`). `start` asks it for the agent of
a new job: the server forks, and the fork compares the job with what was imported (`imports`) and takes the limits of
the process that asks (`peer`). If anything differs, it refuses, and the job starts cold. `leave` starts a server, also
when a job has ended, for the next one.
"""
