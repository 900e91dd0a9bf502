"""Several replicas with NCCL, on this machine's GPUs or side by side on one."""
