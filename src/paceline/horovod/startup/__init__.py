"""A folder for PYTHONPATH: every Python program that finds it there can import `horovod`."""
