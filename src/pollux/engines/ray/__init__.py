"""Many machines, by Ray: the same job manager and jobs as on one, with processes started by agents on the nodes.

    server ── engine ──socket── proxy ──Ray── supervisor (on the head, outlives servers) ──Ray── node agents
                                                │                                                └─ replicas
                                                └─ placement groups, each holding one slot for one replica

The server itself never joins Ray, which ends processes whose node it loses: the proxy does, and is replaced.
"""
