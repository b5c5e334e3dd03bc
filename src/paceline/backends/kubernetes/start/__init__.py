"""From a checked job to its pods: makes the objects, sends the code, and ends a job whose client is gone."""
