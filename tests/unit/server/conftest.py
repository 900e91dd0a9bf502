"""Fixtures of the server's tests: databases on each backend."""

from tests.postgres import place, postgres

__all__ = ["place", "postgres"]
