"""The live cluster: what keeps it, serves it and shows it. Rightmost in the arrows, beside ``engines`` and ``cli``."""
