"""What a person types, one file a group of verbs."""
