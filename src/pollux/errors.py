"""Every exception Pollux raises on purpose.

    PolluxError
    ├── InvalidValueError (ValueError)     an invalid value: a batch bound, a weight, a time
    ├── InputFileError (ValueError)        a file that cannot be used; names file, row and what is allowed
    ├── UnknownNameError (LookupError)     an unknown policy, workload, application or job
    ├── ProfileError (ValueError)          invalid measured times: NaN, zero, negative
    ├── FitError (RuntimeError)            the throughput model could not be fitted and there is no older fit
    ├── PolicyError (RuntimeError)         a policy failed, or answered with something that is no plan
    ├── InvalidPlanError (ValueError)      a policy's plan breaks a rule of the cluster
    ├── InvalidTransitionError (RuntimeError)  a job was asked to change state against the lifecycle table
    ├── SimulationError (RuntimeError)     a simulation cannot go on
    ├── MembershipError (RuntimeError)     a replica cannot find its group, or asks it for what it cannot do
    ├── PeerLostError (RuntimeError)       other replicas are gone and were not replaced in time
    ├── FencedError (RuntimeError)         a replica that its owner has given up must neither report nor save
    ├── EngineError (RuntimeError)         the jobs' processes cannot be reached: no supervisor, or another's
    ├── StoreError (RuntimeError)          the server's database cannot be used: damaged, of another version, disk full
    │   └── NotLeaderError                 another server leads: this one may only read
    ├── DirectoryInUseError (RuntimeError)  another server has this data directory
    ├── ServerError (RuntimeError)         the server cannot be reached, or its answer is not understood
    │   ├── ServerNotFoundError            no server answers at the address
    │   └── ServerUnavailableError         it is there, but cannot answer now: starting, too busy, cut off
    ├── AccessDeniedError (PermissionError)  no token, a wrong one, or one that is not good for this
    ├── JobFailedError (RuntimeError)      the job whose result was asked for has failed; carries its failure
    ├── JobCancelledError (RuntimeError)   the job whose result was asked for was cancelled
    └── CheckpointError (RuntimeError)     a checkpoint cannot be written or is damaged
        ├── ForeignCheckpointError         it belongs to another model, or to a newer Pollux
        └── UnreadableCheckpointError      there are checkpoints, and all of them are damaged

A message says what was wrong, what was seen, and what is allowed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


class PolluxError(Exception):
    """Base of all errors raised on purpose."""


class InvalidValueError(PolluxError, ValueError):
    pass


class InputFileError(PolluxError, ValueError):
    def __init__(self, path: str | Path, problem: str, row: int | None = None) -> None:
        self.path, self.row, self.problem = str(path), row, problem
        where = self.path if row is None else f"{self.path}, row {row}"
        super().__init__(f"{where}: {problem}")

    def __reduce__(self) -> tuple[type[InputFileError], tuple[str, str, int | None]]:
        return InputFileError, (self.path, self.problem, self.row)


class UnknownNameError(PolluxError, LookupError):
    def __init__(self, kind: str, name: str, known: Iterable[str], hint: str = "") -> None:
        """``hint``: a sentence that helps more than the nearest name."""
        self.kind, self.name, self.known, self.hint = kind, name, sorted(known), hint
        close = difflib.get_close_matches(name, self.known, n=1)
        if not hint and close:
            hint = f"Did you mean {close[0]!r}?"
        super().__init__(f"unknown {kind} {name!r}.{hint and ' '}{hint} Known: {', '.join(self.known) or 'none'}.")

    def __reduce__(self) -> tuple[type[UnknownNameError], tuple[str, str, list[str], str]]:
        return UnknownNameError, (self.kind, self.name, self.known, self.hint)


class ProfileError(PolluxError, ValueError):
    pass


class FitError(PolluxError, RuntimeError):
    pass


class PolicyError(PolluxError, RuntimeError):
    pass


class InvalidPlanError(PolluxError, ValueError):
    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__(*problems)

    def __str__(self) -> str:
        return "; ".join(self.problems)


class InvalidTransitionError(PolluxError, RuntimeError):
    pass


class SimulationError(PolluxError, RuntimeError):
    pass


class MembershipError(PolluxError, RuntimeError):
    pass


class PeerLostError(PolluxError, RuntimeError):
    pass


class FencedError(PolluxError, RuntimeError):
    pass


class EngineError(PolluxError, RuntimeError):
    pass


class StoreError(PolluxError, RuntimeError):
    pass


class NotLeaderError(StoreError):
    pass


class DirectoryInUseError(PolluxError, RuntimeError):
    pass


class ServerError(PolluxError, RuntimeError):
    pass


class ServerNotFoundError(ServerError):
    pass


class ServerUnavailableError(ServerError):
    pass


class AccessDeniedError(PolluxError, PermissionError):
    pass


class JobFailedError(PolluxError, RuntimeError):
    def __init__(self, job: str, reason: str, failure: str = "", exit_code: int | None = None) -> None:
        self.job, self.reason, self.failure, self.exit_code = job, reason, failure, exit_code
        super().__init__("\n".join(part for part in (f"job {job!r} failed: {reason}", failure) if part))

    def __reduce__(self) -> tuple[type[JobFailedError], tuple[str, str, str, int | None]]:
        return JobFailedError, (self.job, self.reason, self.failure, self.exit_code)


class JobCancelledError(PolluxError, RuntimeError):
    pass


class CheckpointError(PolluxError, RuntimeError):
    pass


class ForeignCheckpointError(CheckpointError):
    pass


class UnreadableCheckpointError(CheckpointError):
    pass
