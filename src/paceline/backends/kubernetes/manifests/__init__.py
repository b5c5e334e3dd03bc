"""What a job is made of in a cluster: its object and all that this owns. `kinds` has a file per kind of object."""
