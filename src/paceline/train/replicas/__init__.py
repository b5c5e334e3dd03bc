"""Whether the ranks have the same parameters and numbers of optimizers: checksums, and what their differences mean."""
