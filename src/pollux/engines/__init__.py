"""Engines: they run jobs on nodes, tell what happened, and decide nothing."""
