"""Looks at Slurm jobs, and changes none: what Slurm and the nodes say of them, their events and their lines."""
