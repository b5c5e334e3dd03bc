"""Jobs of a Slurm cluster: what a client asks on a machine that has Slurm's commands, and what runs on the nodes."""
