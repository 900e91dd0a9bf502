"""Many machines, by Ray: the same stewards, keepers and jobs as on one, with processes started by agents on the nodes.

    server ── engine ──lines── relay ──Ray── steward (on the head, outlives servers) ──Ray── agents (one per node)
                                                │                                             └─ replicas
                                                └─ placement groups with one seat for each replica

The server itself never joins Ray, which ends processes whose node it loses: the relay does, and is replaced.
"""
