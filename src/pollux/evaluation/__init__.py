"""Judges policies: published evaluations as suites, and recorded jobs run again. No cluster needs this package."""
