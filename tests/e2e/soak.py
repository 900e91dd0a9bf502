"""A lab's cluster under a thousand faults, in pieces of under an hour: ``make soak``.

    python -m tests.e2e.soak [--faults 1000] [--piece 50] [--minutes 55] [--seed 0] [--postgres] [--resume]

Each piece is a cluster of its own with two teams, which have guarantees, four users and twenty jobs (ledgers, which
know how often each example was consumed: see scripts/ledger.py). A few jobs run at a time; when one ends its user
submits the next. Faults are drawn at random, by the piece's seed (``--seed`` plus its number). At the end every job
must have succeeded with every example consumed once an epoch; on the way each team must have the guaranteed slots again
that it can use, soon after a fault. How many that are says the server (``wanted`` of ``pollux team ls``: no more than
the policy found a use for), and at least one if the team has a job; looks in which that was less than the guarantee are
counted. Of torn files: a job's newest checkpoint is torn only if another one is whole, as a job without any is held
until its owner has acted (see test_live_cluster.py).

What was counted is kept in ``--state`` as JSON, also of a piece that failed; ``--resume`` goes on after the last piece
that is there.

With ``--postgres`` two servers share a PostgreSQL database of the run's own, one leads, the other stands by.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pollux.api.access import TeamChange, UserChange, parse_slots
from pollux.client import Client, Job
from pollux.errors import PolluxError, ServerError
from tests.e2e import cluster as cluster_module
from tests.e2e.chaos import Chaos
from tests.e2e.test_failover import Pair
from tests.postgres import PostgresServer, why_not

TEAMS = {"vision": 2, "nlp": 1}  # guaranteed slots
USERS = {"ada": "vision", "bob": "vision", "cyd": "nlp", "dan": "nlp"}
NUM_SLOTS = 4
NUM_JOBS = 20  # of a piece
AT_ONCE = 4  # jobs that are not over
EPOCHS = 100
GUARANTEE_S = 90.0  # on a busy machine, from a fault to all guarantees
SLOW_S = 10.0  # a look that takes longer is told
CHECK_EVERY = 5  # faults
DISK_MIB = 96
END_S = 420.0
ASK_S = 60.0  # for an answer, over a fail-over
# The wall clock of servers is shifted by what the file says, as if the machine's had been set.
SHIFTED = """
import time, pathlib
_wall, _file = time.time, pathlib.Path({file!r})
def _shifted():
    try:
        return _wall() + float(_file.read_text())
    except (OSError, ValueError):
        return _wall()
time.time = _shifted
"""


class LabCluster(Pair):
    """Users submit with tokens of their own, to the server that leads."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(folder, **options)
        self.tokens: dict[str, str] = {}
        self.user = ""
        self.clock = folder / "clock"

    def make_users(self) -> None:
        for team, slots in TEAMS.items():
            self.client.add_team(team, TeamChange(guarantee=parse_slots(str(slots))))
        for user, team in USERS.items():
            self.client.add_user(user, UserChange(team=team))
            self.tokens[user] = self.client.make_token(user).token

    def submit(self, *command: object, **options: Any) -> Job:
        url = json.loads((self.data / "server.json").read_text())["url"]
        with Client(url=url, token=self.tokens[self.user], timeout_s=20.0) as client:
            made = client.submit([sys.executable, *map(str, command)], cwd=str(self.folder), **options)
        assert isinstance(made, Job)
        return made


class Soak(Chaos):
    def __init__(self, cluster: LabCluster, seed: int, postgres: PostgresServer | None, database: str) -> None:
        super().__init__(cluster, [], seed)
        self.cluster: LabCluster = cluster
        self._postgres, self._database = postgres, database
        self.submitted: list[str] = []
        self.hurried: list[str] = []
        self.guarantee_s: list[float] = []
        self.slow_looks: list[str] = []
        self.num_partly_wanted = 0  # looks in which a team had no use for all that it is guaranteed
        has_disk = os.path.ismount(cluster.data / "jobs")
        self.faults = {
            "a replica killed": (0.24, self.kill_replica),
            "all replicas of a job killed": (0.06, self.kill_job),
            "a replica frozen": (0.08, self.freeze_replica),
            "the fork server killed": (0.08, self.kill_fork_server),
            "the supervisor killed": (0.06, self.kill_supervisor),
            "a node drained": (0.06, self.drain),
            "a file torn": (0.08, self.tear_file),
            "the clock set, and the server killed": (0.06, self.set_clock),
        }
        if has_disk:
            self.faults["the disk full"] = (0.06, self.fill_disk)
        if postgres is None:
            self.faults["the server killed"] = (0.22, self.kill_server)
            self.faults["the server frozen"] = (0.06, self.freeze_server)
        else:
            self.faults["the leader killed"] = (0.12, self.kill_leader)
            self.faults["the leader frozen"] = (0.05, self.freeze_leader)
            self.faults["the standby killed"] = (0.05, self.kill_standby)
            self.faults["connections to the database cut"] = (0.08, self.cut_connections)
            self.faults["the database killed"] = (0.04, self.kill_database)

    # --- jobs ------------------------------------------------------------------------------------------------------

    def tend(self, num_wanted: int) -> None:
        """Keep jobs coming, and let so many of them come to their end."""
        self.names = self._patiently(self._active)
        for name in self.names:
            if len(self.hurried) >= num_wanted:
                break
            if name not in self.hurried:
                self.hurried.append(name)
                self.cluster.hurry(name)
        while len(self.names) < AT_ONCE and len(self.submitted) < NUM_JOBS:
            number = len(self.submitted)
            name, self.cluster.user = f"job{number}", list(USERS)[number % len(USERS)]
            bounds = {"min_replicas": 1, "max_replicas": NUM_SLOTS, "max_restarts": 100_000}
            self._patiently(lambda name=name, bounds=bounds: self._submit_once(name, bounds))
            self.submitted.append(name)
            self.names.append(name)

    def _submit_once(self, name: str, bounds: dict[str, Any]) -> None:
        """A submission whose answer was lost with a server or a connection may have been kept all the same."""
        if name not in {job.name for job in self.cluster.client.jobs(limit=1000)}:
            self.cluster.submit_ledger(name, epochs=EPOCHS, step_s=0.05, **bounds)

    def _patiently(self, ask: Callable[[], Any]) -> Any:
        """As users do: a server that says 503, or has just gone, is asked again."""
        ends_at = time.monotonic() + ASK_S
        while True:
            try:
                return ask()
            except ServerError:
                if time.monotonic() > ends_at:
                    raise
                time.sleep(0.5)

    def _active(self) -> list[str]:
        states = ["pending", "starting", "running", "resizing", "stopping"]
        return [job.name for job in self.cluster.client.jobs(states)]

    def check_guarantees(self) -> None:
        """No node is drained, and each team that has a job which can use them has its slots, within a while."""
        began = time.monotonic()
        drained = self._patiently(lambda: [node.name for node in self.cluster.client.nodes() if node.is_draining])
        assert not drained, f"a node that was to be used again is drained: {drained}\n{self.cluster.log()}"
        missing, seen = "not asked yet", dict[str, float]()
        while missing:
            if time.monotonic() - began > GUARANTEE_S:
                stories = "\n".join(self.cluster.story(name) for name in self._patiently(self._active))
                teams = self._patiently(self.cluster.client.teams)
                raise AssertionError(f"after {GUARANTEE_S:g} s {missing}\n{teams}\n{stories}\n{self.cluster.log()}")
            try:
                missing = self._missing_guarantee()
            except PolluxError as error:
                missing = str(error)
            if missing:
                seen[missing] = round(time.monotonic() - began, 1)
            time.sleep(0.2)
        self.guarantee_s.append(time.monotonic() - began)
        if self.guarantee_s[-1] > SLOW_S:
            self.slow_looks.append(f"{self.guarantee_s[-1]:.1f} s; until when what was missing: {seen}")
            print(self.slow_looks[-1], flush=True)

    def _missing_guarantee(self) -> str:
        states = ["pending", "starting", "running", "resizing", "stopping"]
        jobs = [job.view() for job in self.cluster.client.jobs(states)]
        can_use = {team.name: max(team.num_wanted, 1) for team in self.cluster.client.teams()}
        is_partly_wanted = False
        for team, slots in TEAMS.items():
            own = [job for job in jobs if USERS.get(job.owner) == team]
            if all(job.name in self.hurried for job in own):
                continue
            held = sum(job.num_replicas for job in own if job.state in ("running", "resizing"))
            is_partly_wanted |= can_use[team] < slots
            if held < min(can_use[team], slots):
                told = ", ".join(f"{job.name} {job.state} {job.num_replicas} {job.reason}" for job in own)
                return f"team {team} has {held} of {can_use[team]} slots that it can use of its {slots}: {told}"
        self.num_partly_wanted += is_partly_wanted
        return ""

    # --- faults ----------------------------------------------------------------------------------------------------

    def kill_leader(self) -> bool:
        self.cluster.kill_server()
        self.cluster.until_the_standby_leads()
        self.cluster.start_standby()
        return True

    def freeze_leader(self) -> bool:
        old = self.cluster.server
        assert old is not None
        old.send_signal(signal.SIGSTOP)
        try:
            self.cluster.until_the_standby_leads()
        finally:
            old.send_signal(signal.SIGCONT)
        self.cluster.until(lambda: self.cluster.told("standby.json").get("pid") == old.pid, "the old leader stands by")
        return True

    def freeze_server(self) -> bool:
        assert self.cluster.server is not None
        self.cluster.server.send_signal(signal.SIGSTOP)
        time.sleep(self.rng.uniform(0.5, 4.0))
        self.cluster.server.send_signal(signal.SIGCONT)
        return True

    def kill_standby(self) -> bool:
        assert self.cluster.standby is not None
        self.cluster.standby.kill()
        self.cluster.standby.wait()
        self.cluster.start_standby()
        return True

    def cut_connections(self) -> bool:
        assert self._postgres is not None
        return self._postgres.cut_connections(self._database) > 0

    def kill_database(self) -> bool:
        assert self._postgres is not None
        self._postgres.stop()
        time.sleep(self.rng.uniform(0.2, 2.0))
        self._postgres.start()
        self._settle()
        return True

    def set_clock(self) -> bool:
        self.cluster.clock.write_text(str(self.rng.uniform(-3600.0, 3600.0)))
        return self.kill_server() if self._postgres is None else self.kill_leader()

    def fill_disk(self) -> bool:
        filling = self.cluster.data / "jobs" / ".filling"
        try:
            with contextlib.suppress(OSError), filling.open("wb", buffering=0) as file:
                while True:
                    file.write(b"\1" * (1 << 20))
            time.sleep(self.rng.uniform(1.0, 3.0))
        finally:
            filling.unlink(missing_ok=True)
        return True

    def tear_file(self) -> bool:
        """What a crash of the machine may leave: half of the newest checkpoint, or of a small file of the server."""
        checkpoints = list((self.cluster.data / "jobs").glob("*/checkpoints/step-*/*.safetensors"))
        if checkpoints and self.rng.random() < 0.6:
            newest = max(checkpoints, key=lambda path: path.stat().st_mtime)
            job = newest.relative_to(self.cluster.data / "jobs").parts[0]
            if job not in self.names:
                return False
            pids = list(self.cluster.pids(job).values())
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            whole = sorted(filter(_is_whole, newest.parents[1].glob("step-*/*.safetensors")), key=_modified)
            if len(whole) < 2:
                return False  # the last one that is left is spared
            os.truncate(whole[-1], whole[-1].stat().st_size // 2)
            return bool(pids)
        names = ["node-seconds.json", "settings.json", "supervisor-ends.json", "storage.json"]
        found = [path for name in names if (path := self.cluster.data / name).exists()]
        victim = self.rng.choice(found)
        if self._postgres is None:
            self.cluster.kill_server()
            os.truncate(victim, victim.stat().st_size // 2)
            self.cluster.start()
        else:
            os.truncate(victim, victim.stat().st_size // 2)
            self.kill_leader()
        return True

    def _settle(self) -> None:
        """Until one of the servers leads again; from then on that one is ``server``."""
        cluster = self.cluster
        assert cluster.server is not None and cluster.standby is not None

        def find() -> bool:
            assert cluster.server is not None and cluster.standby is not None
            if cluster.leads(cluster.server):
                return True
            if cluster.leads(cluster.standby):
                cluster.server, cluster.standby = cluster.standby, cluster.server
                return True
            return False

        cluster.until(find, "a leader")
        cluster.until(cluster._is_ready, "a client of it")

    def after_fault(self) -> None:
        if self._postgres is not None:
            self._settle()


def _is_whole(file: Path) -> bool:
    try:
        size = json.loads((file.parent / "manifest.json").read_text())["files"][file.name]["size_bytes"]
        return bool(file.stat().st_size == size)
    except (OSError, ValueError, KeyError):
        return False


def _modified(file: Path) -> float:
    return file.stat().st_mtime


# A piece ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A disk for the jobs that can be filled, where one can be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder)]
    is_mounted = os.geteuid() == 0 and subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)


def run_piece(
    folder: Path, num_faults: int, seed: int, postgres: PostgresServer | None, ends_at: float, keep: Path | None = None
) -> Any:
    """What was counted; ``keep``: where to, if it fails.

    Raises AssertionError if a job or an example was lost, or a guarantee was not kept.
    """
    database = "" if postgres is None else postgres.new_database()
    options = {} if postgres is None else {"database": postgres.url(database)}
    began = time.monotonic()
    data = folder / "data"
    data.mkdir(mode=0o700, parents=True)
    with small_disk(data / "jobs"):
        cluster = LabCluster(folder, slots=None, nodes="2x2", min_free_mib=16, **options)
        try:
            cluster.start()
            if postgres is not None:
                cluster.start_standby()
            cluster.make_users()
            soak = Soak(cluster, seed, postgres, database)
            soak.tend(0)
            cluster.until(lambda: any(cluster.pids(name) for name in soak.names), "a job that trains")
            while (done := sum(soak.counts.values())) < num_faults and time.monotonic() < ends_at:
                soak.strike()
                soak.after_fault()
                time.sleep(soak.rng.uniform(0.0, 1.0))
                if done % CHECK_EVERY == 0:
                    soak.check_guarantees()
                soak.tend(int(NUM_JOBS * done / num_faults))
            _come_to_the_end(cluster, soak)
        except BaseException:
            if keep is not None:
                with contextlib.suppress(shutil.Error):  # sockets cannot be copied
                    shutil.copytree(folder, keep, dirs_exist_ok=True, ignore_dangling_symlinks=True)
            raise
        finally:
            cluster.stop()
    return {
        "seed": seed,
        "ok": True,
        "faults": dict(soak.counts),
        "num_faults": sum(soak.counts.values()),
        "jobs": len(soak.submitted),
        "users": len(USERS),
        "lost_jobs": 0,
        "lost_or_repeated_examples": 0,
        "guarantee_checks": len(soak.guarantee_s),
        "longest_guarantee_s": round(max(soak.guarantee_s, default=0.0), 1),
        "looks_with_less_wanted": soak.num_partly_wanted,
        "slow_looks": soak.slow_looks,
        "database": "sqlite" if postgres is None else "postgresql",
        "took_s": round(time.monotonic() - began, 1),
    }


def _come_to_the_end(cluster: LabCluster, soak: Soak) -> None:
    ends_at = time.monotonic() + END_S
    while len(soak.submitted) < NUM_JOBS or soak._patiently(soak._active):
        soak.tend(NUM_JOBS)
        if time.monotonic() > ends_at:
            raise AssertionError(f"not over after {END_S:g} s: {soak.names}\n{cluster.log()}")
        time.sleep(0.5)
    for name in soak.submitted:
        state = cluster.client.job(name).view().state
        assert state == "succeeded", f"{name} {state}\n{cluster.story(name)}"
        cluster.check_ledger(name, EPOCHS)
    known = {job.name for job in cluster.client.jobs(limit=1000)}
    assert known == set(soak.submitted), f"jobs lost or made up: {known ^ set(soak.submitted)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000, help="in all pieces together")
    parser.add_argument("--piece", type=int, default=50, help="faults of a piece")
    parser.add_argument("--minutes", type=float, default=55.0, help="begin no further piece after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--state", type=Path, default=Path("out/soak.json"))
    parser.add_argument("--keep", type=Path, help="keep the folder of a piece that fails here")
    args = parser.parse_args()
    if args.postgres and (reason := why_not()):
        print(f"--postgres: {reason}", file=sys.stderr)
        return 2
    pieces: list[dict[str, Any]] = []
    if args.resume and args.state.exists():
        pieces = json.loads(args.state.read_text())["pieces"]
    begun = time.monotonic()
    postgres = PostgresServer() if args.postgres else None
    if postgres is not None:
        os.environ["PGPASSFILE"] = str(postgres.password_file)
    try:
        while _total(pieces) < args.faults and time.monotonic() - begun < 60 * args.minutes:
            pieces.append(_one(args, len(pieces), postgres, begun))
            _save(args.state, pieces)
            if not pieces[-1]["ok"]:
                break
    finally:
        if postgres is not None:
            postgres.close()
    _print(pieces, args.faults)
    return 0 if all(piece["ok"] for piece in pieces) else 1


def _one(args: argparse.Namespace, number: int, postgres: PostgresServer | None, begun: float) -> dict[str, Any]:
    seed = args.seed + number
    folder = Path(tempfile.mkdtemp(prefix="pollux-soak-"))
    shift = SHIFTED.format(file=str(folder / "clock"))
    before = cluster_module.SERVE
    _set_serve(shift + before)
    print(f"piece {number}, seed {seed}: {folder}", flush=True)
    try:
        ends_at = begun + 60 * args.minutes
        piece: dict[str, Any] = run_piece(folder, args.piece, seed, postgres, ends_at, args.keep)
    except (Exception, KeyboardInterrupt) as error:
        traceback.print_exc()
        return {"seed": seed, "ok": False, "num_faults": 0, "why": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        _set_serve(before)
        shutil.rmtree(folder, ignore_errors=True)
    return piece


def _set_serve(text: str) -> None:
    from tests.e2e import test_failover

    for module in (cluster_module, test_failover):
        vars(module)["SERVE"] = text


def _total(pieces: list[dict[str, Any]]) -> int:
    return sum(piece["num_faults"] for piece in pieces if piece["ok"])


def _save(path: Path, pieces: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps({"num_faults": _total(pieces), "pieces": pieces}, indent=1))
    beside.replace(path)


def _print(pieces: list[dict[str, Any]], wanted: int) -> None:
    good = [piece for piece in pieces if piece["ok"]]
    counts: Counter[str] = Counter()
    for piece in good:
        counts.update(piece["faults"])
    jobs = sum(piece["jobs"] for piece in good)
    print(f"\n{_total(pieces)} of {wanted} faults in {len(good)} pieces, {jobs} jobs of {len(USERS)} users")
    for name, count in counts.most_common():
        print(f"{count:5}  {name}")
    if good:
        checks = sum(piece["guarantee_checks"] for piece in good)
        longest = max(piece["longest_guarantee_s"] for piece in good)
        print("0 jobs lost, 0 examples lost or repeated")
        less = sum(piece["looks_with_less_wanted"] for piece in good)
        print(
            f"guarantees were kept in {checks} of {checks} looks, after {longest} s at most; in {less} of them a team"
        )
        print("had no use for all that it is guaranteed")
    for piece in pieces:
        if not piece["ok"]:
            print(f"FAILED: the piece with seed {piece['seed']}: {piece['why']}")


if __name__ == "__main__":
    sys.exit(main())
