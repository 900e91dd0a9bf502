"""Studies whose server, trials and fork server are killed at random: ``make study-kills``.

    python -m tests.e2e.study_kills [--kills 50] [--piece 10] [--seed 0]

Each piece is a cluster of its own. One study after the other is begun there, and killed into at random moments, until
the piece has its kills. Studies take turns: one trains all its trials to the end and has drawn them at random, one
prunes and draws by what it has learnt. Afterwards each trial must be there once, with one job and one value after each
epoch. The first kind must have found what the same study finds when nothing is killed: the same parameters, the same
values up to rounding, and so the same order of best trials. The seed fixes what is killed and when.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from pollux.api.study import StudyDetail
from pollux.errors import PolluxError
from pollux.tune import Study
from tests.e2e.cluster import LiveCluster
from tests.e2e.jobs import SCRIPTS

SPACE = {"lr": "log:1e-3..0.3", "momentum": "0.0..0.9"}
TRIALS, EPOCHS, STEP_S = 6, 6, 0.04
VICTIMS = {"the server": 0.4, "a trial": 0.4, "the fork server": 0.2}
KINDS: tuple[dict[str, Any], ...] = ({"pruner": "none", "sampler": "random"}, {"pruner": "asha", "sampler": "tpe"})
MOST_PAUSE_S = 3.0  # between two kills
END_S = 300.0
ROUNDING = 1e-6  # of a value, after other numbers of replicas


class StudyKills:
    """Begins studies in a cluster, kills into them, and checks what they have found."""

    def __init__(self, cluster: LiveCluster, seed: int) -> None:
        self.cluster, self.rng = cluster, random.Random(seed)
        self.counts: Counter[str] = Counter()
        self.num_studies = 0
        self._seed = seed

    def run(self, num_kills: int) -> None:
        """Whole studies until so many kills are done."""
        undisturbed: dict[int, StudyDetail] = {}
        while self.counts.total() < num_kills:
            kind = KINDS[self.num_studies % len(KINDS)]
            seed = 1000 * self._seed + self.num_studies
            self.num_studies += 1
            if kind["pruner"] == "none":
                undisturbed[seed] = self._begin(f"undisturbed-{seed}", seed, kind, 0.0).wait(END_S)
            study = self._begin(f"study-{seed}", seed, kind, STEP_S)
            while self.counts.total() < num_kills:
                time.sleep(self.rng.uniform(0.0, MOST_PAUSE_S))
                if study_of(self.cluster, study.name).describe().is_over:
                    break
                self._strike(study.name)
            self._check(study.name, undisturbed.get(seed))

    def _begin(self, name: str, seed: int, kind: dict[str, Any], step_s: float) -> Study:
        command = ["python", str(SCRIPTS / "trial.py"), "--epochs", str(EPOCHS), "--step-s", str(step_s)]
        options = {"name": name, "seed": seed, "max_restarts": 10_000, "min_progress": 1 / EPOCHS, **kind}
        made = Study(command, space=SPACE, metric="loss", trials=TRIALS, client=self.cluster.client, **options)
        return made.start()

    # Kills ------------------------------------------------------------------------------------

    def _strike(self, name: str) -> None:
        """One kill that really hits something, unless the study ends before."""
        while not study_of(self.cluster, name).describe().is_over:
            (victim,) = self.rng.choices(list(VICTIMS), list(VICTIMS.values()))
            try:
                if self._kill(victim, name):
                    self.counts[victim] += 1
                    print(f"{self.counts.total():4}  {name}  {victim}", flush=True)
                    return
            except (psutil.Error, ProcessLookupError, StopIteration, PolluxError):
                pass  # it had ended a moment before
            time.sleep(0.1)

    def _kill(self, victim: str, name: str) -> bool:
        if victim == "the server":
            self.cluster.kill_server()
            time.sleep(self.rng.uniform(0.0, 0.5))
            self.cluster.start()
            return True
        if victim == "the fork server":
            self.cluster.fork_server.kill()
            return True
        trials = study_of(self.cluster, name).describe().trials
        running = [one.job for one in trials if one.state == "running" and one.num_replicas]
        pids = sorted(pid for job in running for pid in self.cluster.pids(job).values() if pid is not None)
        if pids:
            os.kill(self.rng.choice(pids), signal.SIGKILL)
        return bool(pids)

    # Checks -----------------------------------------------------------------------------------

    def _check(self, name: str, undisturbed: StudyDetail | None) -> None:
        study = study_of(self.cluster, name)
        found = study.wait(END_S)
        story = f"{name}: {[(one.number, one.state, one.value, one.reason) for one in found.trials]}"
        assert found.state == "finished", (found.state, found.reason, story)
        assert [one.number for one in found.trials] == list(range(TRIALS)), story
        assert all(one.state in ("complete", "pruned") for one in found.trials), story
        self._check_jobs(found, story)
        curves = study.curves().curves
        for one in found.trials:
            epochs = [round(point.progress * EPOCHS, 3) for point in curves[str(one.number)]]
            assert epochs == list(range(1, len(epochs) + 1)), (one.number, epochs, story)
            assert one.state == "pruned" or len(epochs) == EPOCHS, (one.number, epochs, story)
        assert best_of(found)[0] == (found.best_value, found.best_trial), story
        if undisturbed is not None:
            assert [one.params for one in found.trials] == [one.params for one in undisturbed.trials], story
            ours, theirs = best_of(found), best_of(undisturbed)
            assert [number for _, number in ours] == [number for _, number in theirs], (ours, theirs, story)
            for (value, _), (other, _) in zip(ours, theirs, strict=True):
                assert abs(value - other) <= ROUNDING * abs(other), (ours, theirs, story)

    def _check_jobs(self, found: StudyDetail, story: str) -> None:
        def own() -> list[Any]:
            return [job for job in self.cluster.client.jobs() if job.name.startswith(f"{found.name}-")]

        self.cluster.until(lambda: all(job.is_done for job in own()), f"the end of all jobs of {found.name}")
        assert sorted(job.name for job in own()) == sorted(one.job for one in found.trials), story
        assert len({one.job for one in found.trials}) == TRIALS, story


def study_of(cluster: LiveCluster, name: str) -> Study:
    """By the present server's client."""
    return Study.attach(name, cluster.client)


def best_of(found: StudyDetail) -> list[tuple[float, int]]:
    """Value and number of all trials, the best first."""
    return sorted((float(one.value), one.number) for one in found.trials if isinstance(one.value, int | float))


def run_piece(folder: Path, num_kills: int, seed: int) -> StudyKills:
    cluster = LiveCluster(folder).start()
    try:
        kills = StudyKills(cluster, seed)
        kills.run(num_kills)
    except BaseException:
        print(cluster.log(), file=sys.stderr)
        raise
    finally:
        cluster.stop()
    return kills


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--piece", type=int, default=10, help="kills in one cluster (default 10)")
    parser.add_argument("--seed", type=int, default=0, help="of the first piece; the next one has the next")
    args = parser.parse_args()
    counts: Counter[str] = Counter()
    num_studies, begun, seed = 0, time.monotonic(), args.seed
    while counts.total() < args.kills:
        with tempfile.TemporaryDirectory(prefix="study-kills-") as folder:
            piece = run_piece(Path(folder), min(args.piece, args.kills - counts.total()), seed)
        counts += piece.counts
        num_studies += piece.num_studies
        print(f"seed {seed}: {dict(piece.counts)}, {piece.num_studies} studies as they should be", flush=True)
        seed += 1
    print(f"{counts.total()} kills, {num_studies} studies, {time.monotonic() - begun:.0f} s: {dict(counts)}")


if __name__ == "__main__":
    main()
