"""What a job is made of in a cluster: its object and all that this owns. `kinds` are the kinds of objects."""
