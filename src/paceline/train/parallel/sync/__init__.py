"""How ranks exchange what they have learned: every step or not, exactly or compressed, by which way."""
