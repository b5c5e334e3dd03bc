"""Models and optimizers that train together."""
