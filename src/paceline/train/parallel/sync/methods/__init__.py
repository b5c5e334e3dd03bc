"""When the ranks exchange: every step, or every few steps; each method is a `Synchroniser`."""
