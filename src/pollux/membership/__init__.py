"""Who trains together: the rosters of a job's replicas, and the protocol by which they agree on one.

The owner of a job publishes rosters (``controller``), its replicas follow them (``replica``). Nothing here imports
torch at import time: ``store`` loads it when a store is opened, because torch's process groups need torch's own store.
"""
