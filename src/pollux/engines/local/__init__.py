"""The engine of one machine: a supervisor process, found by a socket in the data directory. It decides nothing."""
