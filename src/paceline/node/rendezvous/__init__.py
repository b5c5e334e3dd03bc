"""How the agents of a job find each other, and who coordinates them."""
