"""Processes of jobs: slots, starters, the fork server, elastic and fixed jobs, and the manager of all jobs.

``local`` and ``ray`` use it, each with its own way of starting processes. Only ``fork_main``, which the replicas run
in, imports :mod:`pollux.train`.
"""
