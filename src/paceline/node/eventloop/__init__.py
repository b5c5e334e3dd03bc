"""Sockets, signals, deadlines and changes of files, in one thread."""
