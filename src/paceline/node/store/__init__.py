"""The jobs of a machine: made, recorded, stopped, removed."""
