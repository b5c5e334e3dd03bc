"""What a machine has and what is in use: devices, processes, network, software."""
