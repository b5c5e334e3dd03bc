"""What happens in a node's part of a job, one record a line, and the state that follows from it."""
