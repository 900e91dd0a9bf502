"""The Python client of a Pollux server: submit jobs, wait for them, look at them. The command line is made of it.

A :class:`Job` is like a future: ``pollux.Client().submit(["python", "train.py"]).result()``. Needs httpx (the ``cli``
extra).
"""

from pollux.api.job import FINAL_STATES
from pollux.client.address import Address, find_address, find_data_directory
from pollux.client.client import Client, Job, JobResult
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
