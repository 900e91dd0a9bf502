"""Who trains together: the rosters of a job's replicas, and the protocol by which they agree on one.

The owner of a job publishes rosters (``controller``), its replicas follow them (``replica``). They meet in a store that
the owner serves to programs that know the job's secret. Only ``torch_store`` imports torch.
"""
