"""Which ranks sum with which: within a machine or a fast group of machines, and then between them."""
