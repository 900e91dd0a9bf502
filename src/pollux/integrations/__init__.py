"""Training frameworks on top of ``pollux.train``. Each module imports its framework; this one imports none."""
