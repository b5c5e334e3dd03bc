"""A machine that runs paceline's node side for a client: over ssh, or this one."""
