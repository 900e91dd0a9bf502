"""The scheduler with a virtual clock and simulated jobs: workloads, applications, engine and results."""
