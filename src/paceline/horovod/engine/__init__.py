"""The operations that ranks submit: which of them are ready everywhere, which are done together, and how."""
