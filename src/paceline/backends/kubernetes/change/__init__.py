"""What is done to a job that is there: stop, scale, forward a port."""
