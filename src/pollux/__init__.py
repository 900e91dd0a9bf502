"""Pollux: a co-adaptive scheduler for deep-learning clusters.

Importing this package needs numpy and scipy alone, and changes nothing.
"""

from pollux.version import __version__

__all__ = ["__version__"]
