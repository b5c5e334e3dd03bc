"""In how many bits gradients are sent between machines."""
