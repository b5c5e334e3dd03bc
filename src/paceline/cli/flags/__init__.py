"""The flags of the verbs, and what they mean."""
