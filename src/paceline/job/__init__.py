"""What a job is: its specification, its name, and the folder that holds what is known of it."""
