"""How the agents of a job find each other, and which of them coordinates the job."""
