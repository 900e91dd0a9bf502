"""What the server keeps on disk: the database, published simulations, log files and small JSON files."""
