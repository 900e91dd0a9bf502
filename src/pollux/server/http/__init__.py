"""The HTTP interface: the application, its routes, who may call them, and how errors are answered."""
