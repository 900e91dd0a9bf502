"""A job as one of its replicas sees it: size, batch, progress, when to leave. Training scripts call :func:`join`."""

from __future__ import annotations

import math
import os
import signal
import socket
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn

from pollux.elastic.batch import MAX_NOISE_SCALE, BatchBounds, choose_batch, gain_of
from pollux.elastic.report import STATE_VERSION, JobState, Replica, new_state, report_fields
from pollux.elastic.sender import Address, Fields, Sender
from pollux.elastic.shared_files import SharedFiles, shared_directory, start_id_of
from pollux.errors import InvalidValueError

LEFT_CODE = 143  # as after SIGTERM: saved and left
WARM_UP = 2  # steps of a start that are not timed: they compile and fill caches
NUM_TIMED = 20  # the last step times, whose median is told
NOISE_DECAY = 0.95  # of a step in the averages behind the noise scale
NUM_NOISE = 5  # observations before the noise scale is told


def join(
    *,
    batch_size: int,
    total_examples: float | None = None,
    max_batch_size: int | None = None,
    device_batch_size: int | tuple[int, int] | None = None,
    directory: str | os.PathLike[str] | None = None,
    accelerator: str | None = None,
    env: Mapping[str, str] = os.environ,
) -> Job:
    """Become a replica of the job that the environment describes; alone if it describes none.

    ``batch_size`` is M0, for which the learning rate was tuned. With ``max_batch_size`` the batch adapts between the
    two whenever the job starts; ``device_batch_size`` (one number, or bounds) is what a device takes in one pass.
    ``total_examples`` is how many examples the job needs at batch M0. ``directory`` is where the script keeps its
    checkpoints, POLLUX_CHECKPOINT_DIR by default; all replicas must reach it. ``accelerator`` is the type of the
    device where a cluster has several.

    Raises:
        InvalidValueError: a number that cannot be, or several replicas without a folder.
    """
    bounds = BatchBounds.of(batch_size, max_batch_size, device_batch_size)
    if total_examples is not None and not (math.isfinite(total_examples) and total_examples > 0):
        raise InvalidValueError(f"total_examples is {total_examples}; a positive number is needed")
    replica = Replica.from_environment(env, accelerator)
    folder = shared_directory(directory, env.get("POLLUX_CHECKPOINT_DIR", ""), replica.num_replicas)
    return Job(replica, bounds, total_examples, folder, env)


class Job:
    """Made by :func:`join`. The script calls :meth:`step` after every optimizer step, on every replica."""

    def __init__(
        self,
        replica: Replica,
        bounds: BatchBounds,
        total_examples: float | None,
        directory: Path | None,
        env: Mapping[str, str],
    ) -> None:
        self._replica, self._bounds, self._total_examples = replica, bounds, total_examples
        self.directory = directory
        self.address = f"{env.get('MASTER_ADDR') or '127.0.0.1'}:{env.get('MASTER_PORT') or 0}"
        start_id = start_id_of(env.get("POLLUX_REPLICA_ID", ""), replica.rank, env.get("MASTER_PORT", ""))
        self._files = None if directory is None else SharedFiles(directory, start_id)
        if self._files is not None and replica.rank == 0:
            self._files.clear()
        self._state = new_state()
        self.batch = choose_batch(bounds, replica.num_replicas, replica.num_nodes)
        self._began_at = self._stepped_at = time.monotonic()
        self._num_here = 0  # steps of this start
        self._step_s: deque[float] = deque(maxlen=NUM_TIMED)
        self._grad_s: deque[float] = deque(maxlen=NUM_TIMED)
        self._metrics: dict[str, object] = {}
        self._report: Fields | None = None  # the newest, until it is sent
        self._asked_at: float | None = None
        self._leave_at: int | None = None  # the step after which all replicas leave
        self.listen()
        address = Address.from_environment(env) if replica.rank == 0 else None
        self._sender = None if address is None else Sender(address, self._take_report, self._take_answer)

    # --- present values -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._replica.rank

    @property
    def size(self) -> int:
        """Replicas of this start."""
        return self._replica.num_replicas

    @property
    def num_steps(self) -> int:
        """Optimizer steps since the job began, earlier starts included."""
        return self._state["num_steps"]

    @property
    def num_examples(self) -> int:
        """Examples that these steps used."""
        return self._state["num_examples"]

    @property
    def positions(self) -> range:
        """Which examples of the endless sequence of all examples this replica uses in the next step.

        Replicas share a step without overlap, and a start goes on where the last one stopped: each position is used
        once, whatever the sizes were.
        """
        begin = self.num_examples + self.rank * self.batch.share
        return range(begin, begin + self.batch.share)

    @property
    def noise_scale(self) -> float | None:
        """φ in examples; None until a few steps were observed."""
        signal_sqr, noise, count = self._state["noise"]
        if count < NUM_NOISE:
            return None
        return min(max(noise, 0.0) / max(signal_sqr, 1e-30), MAX_NOISE_SCALE)

    @property
    def gain(self) -> float:
        """AdaScale's factor on the learning rate: how many steps at M0 the next step is worth."""
        return gain_of(self.noise_scale, self._bounds.initial, self.batch.total)

    @property
    def progress(self) -> float | None:
        """Share of the work that is done, 0 to 1; None without ``total_examples``."""
        if self._total_examples is None:
            return None
        return min(self._state["num_useful"] / self._total_examples, 1.0)

    @property
    def is_done(self) -> bool:
        """Whether as much was learnt as ``total_examples`` at batch M0 teach."""
        return self._total_examples is not None and self._state["num_useful"] >= self._total_examples - 1e-6

    # --- training -----------------------------------------------------------------------------------------------

    def observe_noise(self, small_batch: float, small_sqr: float, large_batch: float, large_sqr: float) -> None:
        """Squared norms of gradients over two batch sizes, from which the noise scale follows. Before :meth:`step`.

        ``small_sqr`` is the mean of the squared norms of gradients over ``small_batch`` examples each (those of the
        replicas before they are averaged), ``large_sqr`` the squared norm of their mean, over ``large_batch``. The
        values must be the same on every replica: learning rates follow from them.
        """
        if not 0 < small_batch < large_batch:
            raise InvalidValueError(f"batches of {small_batch} and {large_batch} examples; the first must be smaller")
        if not (math.isfinite(small_sqr) and math.isfinite(large_sqr)):
            return  # a step that overflowed says nothing
        signal_sqr = (large_batch * large_sqr - small_batch * small_sqr) / (large_batch - small_batch)
        noise = (small_sqr - large_sqr) / (1 / small_batch - 1 / large_batch)
        old_signal, old_noise, count = self._state["noise"]
        keep = NOISE_DECAY if count else 0.0
        self._state["noise"] = [
            keep * old_signal + (1 - keep) * signal_sqr,
            keep * old_noise + (1 - keep) * noise,
            count + 1,
        ]

    def step(self, *, grad_s: float | None = None, **metrics: object) -> None:
        """An optimizer step is done, with :attr:`batch`. ``grad_s``: seconds of one pass without communication.

        Step times are measured from call to call.
        """
        now = time.monotonic()
        useful = self.gain * self._bounds.initial if self.batch.total > self._bounds.initial else self.batch.total
        self._state["num_steps"] += 1
        self._state["num_examples"] += self.batch.total
        self._state["num_useful"] += min(useful, self.batch.total)
        if self._num_here >= WARM_UP:
            self._step_s.append(now - self._stepped_at)
            if grad_s is not None and grad_s > 0:
                self._grad_s.append(grad_s)
        elif self._num_here == 0:
            self._state["stalled_s"] += now - self._began_at
            self.listen()
        self._num_here, self._stepped_at = self._num_here + 1, now
        self._metrics.update(metrics)
        if self._sender is not None:
            self._report = self._fields()

    def log(self, **metrics: object) -> None:
        """Metrics that are told with the next report, or when the job ends."""
        self._metrics.update(metrics)

    @property
    def is_asked_to_leave(self) -> bool:
        """Whether this process has received SIGTERM. Other replicas may not have yet: see :meth:`should_leave`."""
        return self._asked_at is not None

    def should_leave(self) -> bool:
        """Whether to save and :meth:`leave` now. Call it once after every :meth:`step`; all replicas are told alike.

        Replicas that average gradients make their steps together. So rank 0 names the step after the next one in a
        file, and no replica can pass that step before the file is there.
        """
        if self.size == 1 or self._files is None:
            return self.is_asked_to_leave
        if self._leave_at is None and self.rank == 0 and self.is_asked_to_leave:
            self._leave_at = self.num_steps + 1
            self._files.put("leave", str(self._leave_at))
            return False
        if self._leave_at is None and self.rank != 0 and (text := self._files.get("leave")) is not None:
            self._leave_at = int(text)
        return self._leave_at is not None and self.num_steps >= self._leave_at

    def leave(self) -> NoReturn:
        """End this process, after the state was saved. The job is started again with another size, or later."""
        self.close()
        raise SystemExit(LEFT_CODE)

    def close(self) -> None:
        """Send what is left to tell. Called by :meth:`leave`, and at the end of ``with elastic.join(...) as job``."""
        sender, self._sender = self._sender, None
        if sender is not None:
            if self._num_here:
                self._report = self._fields()
            sender.close()

    def __enter__(self) -> Job:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- state --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; save it with the model. All replicas load the same one."""
        state = dict(self._state)
        state["noise"], state["grad_s"] = list(self._state["noise"]), self._known_passes()
        if self._asked_at is not None:
            state["stalled_s"] = self._state["stalled_s"] + time.monotonic() - self._asked_at
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; :attr:`batch` is then chosen by what is known of the job. Before the first step."""
        if state.get("version") != STATE_VERSION or state.keys() != self._state.keys():
            raise InvalidValueError(
                f"state with {sorted(state)} of version {state.get('version')!r}; what Job.state_dict() gave is needed"
            )
        if self._num_here:
            raise InvalidValueError(
                f"load_state_dict was called after {self._num_here} steps; call it before the first"
            )
        self._state = JobState(**state)  # type: ignore[typeddict-item]
        replica = self._replica
        self.batch = choose_batch(
            self._bounds, replica.num_replicas, replica.num_nodes, self._state["theta"], self.noise_scale
        )

    def _known_passes(self) -> list[list[float]]:
        """Seconds of a pass by device batch: those known before, and what this start has measured with one replica."""
        known = {int(device): seconds for device, seconds in self._state["grad_s"]}
        if self.size == 1 and self._step_s:
            known[self.batch.device] = statistics.median(self._step_s) / self.batch.num_passes
        return [[device, seconds] for device, seconds in sorted(known.items())]

    # --- other replicas -----------------------------------------------------------------------------------------

    def addresses(self, timeout_s: float = 300.0) -> list[str]:
        """``host:port`` of every replica, by rank, for frameworks that want to know all of them. The ports are free.

        Raises:
            PeerLostError: not all replicas have come.
        """
        own = _own_address(self.address)
        if self.size == 1 or self._files is None:
            return [own]
        self._files.put(f"address-{self.rank}", own)
        return self._files.wait_for([f"address-{rank}" for rank in range(self.size)], timeout_s)

    # --- signals and reports ------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take SIGTERM back from a framework that has taken it, as TensorFlow's and JAX's cluster services do.

        The first step of a start does it, too.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._asked_at is not None:  # asked twice: leave at once, without saving
            raise SystemExit(LEFT_CODE)
        self._asked_at = time.monotonic()

    def _take_report(self) -> Fields | None:
        report, self._report = self._report, None
        return report

    def _take_answer(self, answer: Fields) -> None:
        params = answer.get("params") or {}
        theta = params.get(self._replica.accelerator) or next(iter(params.values()), None)
        if theta is not None:
            self._state["theta"] = [float(value) for value in theta]

    def _fields(self) -> Fields:
        step_s = statistics.median(self._step_s) if self._step_s else None
        pass_s = self._pass_s(step_s) if step_s is not None else None
        if step_s is not None and pass_s is not None:
            step_s = max(step_s - (self.batch.num_passes - 1) * pass_s, pass_s)
        return report_fields(
            replica=self._replica,
            bounds=self._bounds,
            batch=self.batch,
            state=self._state,
            noise_scale=self.noise_scale,
            times=None if step_s is None or pass_s is None else (pass_s, step_s, len(self._step_s)),
            total_examples=self._total_examples,
            metrics=self._metrics,
        )

    def _pass_s(self, step_s: float) -> float:
        """As the script measured it; else as it was with one replica; else no more than the step took."""
        most = step_s / self.batch.num_passes
        if self._grad_s:
            return min(statistics.median(self._grad_s), most)
        known = self._known_passes()
        if self.size == 1 or not known:
            return most
        device, seconds = min(known, key=lambda entry: abs(math.log(entry[0] / self.batch.device)))
        return min(seconds * self.batch.device / device, most)


def _own_address(leader: str) -> str:
    """This machine as the others see it, with a port that is free now."""
    host = leader.rpartition(":")[0]
    if not host.startswith("127.") and host != "localhost":
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing: it asks for the route
            probe.connect((host, 9))
            host = probe.getsockname()[0]
    with socket.create_server((host, 0)) as listener:
        return f"{host}:{listener.getsockname()[1]}"
