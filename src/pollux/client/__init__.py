"""The Python client of a Pollux server: submit jobs, wait for them, look at them. What the command line does, it does
by these verbs. A :class:`Job` is like a future: ``pollux.Client().submit(["python", "train.py"]).result()``.

Stands right of :mod:`pollux.jobs`, left of ``cli``. Needs httpx (the ``cli`` extra).
"""

from pollux.client.address import Address, find_address, find_data_directory
from pollux.client.client import FINAL_STATES, Client, Job, JobResult
from pollux.client.request import make_request

__all__ = [
    "FINAL_STATES",
    "Address",
    "Client",
    "Job",
    "JobResult",
    "find_address",
    "find_data_directory",
    "make_request",
]
