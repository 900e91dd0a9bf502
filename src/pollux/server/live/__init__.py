"""The running cluster: the scheduler thread, the table of live jobs, reports on their way in, and how all is made."""
