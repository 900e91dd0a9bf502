"""The run that ``train.init()`` returns: the interface that a training script uses.

It makes the other objects of ``train``. :mod:`pollux.train.session` handles what happens between two steps.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from pollux.errors import InvalidValueError
from pollux.membership.replica import Membership, membership_from_environment
from pollux.membership.store import Group
from pollux.train.batching import BatchChoice, BatchPolicy, batch_policy, make_limits, shape_of
from pollux.train.checkpoint import CheckpointDirectory
from pollux.train.checkpointer import Checkpointer
from pollux.train.data import ElasticLoader
from pollux.train.http_report import HttpReporter
from pollux.train.leaving import LeaveSignals
from pollux.train.loader import AdaptiveLoader
from pollux.train.moments import GradientMoments
from pollux.train.progress import Progress
from pollux.train.report import FileReporter, Reporter
from pollux.train.run_state import RunState
from pollux.train.scaling import ScalingRule
from pollux.train.session import Session
from pollux.train.sources import length_of
from pollux.train.state import Stateful, flatten
from pollux.train.step_exchange import StepExchange
from pollux.train.team import Team
from pollux.train.trainee import Trainee
from pollux.train.tuner import Tuner

logger = logging.getLogger(__name__)


def init(
    *,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every_s: float | None = None,
    device: str | torch.device | None = None,
    membership: Membership | None = None,
    reporter: Reporter | None = None,
    timeout_s: float = 600.0,
) -> Run:
    """Begin a run: alone, under torchrun, or in a cluster, depending on the environment.

    ``checkpoint_dir`` (or POLLUX_CHECKPOINT_DIR) is where checkpoints are saved and where an interrupted run resumes;
    without it there are no checkpoints. It is a folder, or a URL that fsspec opens, such as s3://bucket/path.
    ``checkpoint_every_s`` sets the interval between checkpoints, which otherwise follows from their cost. ``device`` is
    this replica's GPU if there is one. ``timeout_s`` bounds every wait for other replicas.
    """
    environment = os.environ
    checkpoint_dir = checkpoint_dir or environment.get("POLLUX_CHECKPOINT_DIR") or None
    if reporter is None and environment.get("POLLUX_REPORT_FILE"):
        reporter = FileReporter(environment["POLLUX_REPORT_FILE"])
    if reporter is None:
        reporter = HttpReporter.from_environment(environment)
    membership = membership or membership_from_environment(environment)
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", membership.local_rank % torch.cuda.device_count())
    if checkpoint_every_s is not None and not checkpoint_every_s > 0:
        raise InvalidValueError(f"checkpoint_every_s is {checkpoint_every_s}; it must be a positive number of seconds")
    checkpointer = None
    if checkpoint_dir is not None:
        directory = CheckpointDirectory(checkpoint_dir, may_publish=partial(_may_publish, membership))
        checkpointer = Checkpointer(directory, checkpoint_every_s)
    return Run(membership, device, checkpointer, reporter, timeout_s)


class Run:
    """One training run as one replica sees it. Made by :func:`init`."""

    def __init__(
        self,
        membership: Membership,
        device: torch.device,
        checkpointer: Checkpointer | None,
        reporter: Reporter | None,
        timeout_s: float,
    ) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        self.device = device
        self._team = Team(device, timeout_s)
        if dist.is_initialized():
            if membership.is_elastic:
                raise InvalidValueError(
                    "torch.distributed is initialised already: in a cluster, leave that to train.init()"
                )
            group = membership.join(timeout_s)
            ranks = dist.get_rank(), dist.get_world_size()
            if (group.rank, group.world_size) != ranks:
                raise InvalidValueError(
                    f"torch.distributed says rank {ranks[0]} of {ranks[1]}, the environment rank {group.rank} of "
                    f"{group.world_size}: set RANK and WORLD_SIZE and the other variables of torchrun, or let "
                    "train.init() call init_process_group"
                )
            self._team.adopt(group)
        elif membership.is_elastic:
            # Others may be training already. This replica joins them when it is set up, and is alone until then.
            self._team.form(_alone())
        else:
            self._team.form(membership.join(timeout_s))
        self._signals = LeaveSignals()
        self._session = Session(membership, self._team, self._signals, checkpointer, reporter, timeout_s)
        if isinstance(reporter, HttpReporter):
            reporter.on_fenced = self._session.fence.on_refused
        self._exchange = StepExchange(self._team, GradientMoments(is_relative=True))
        self._progress = Progress()
        self._tracked: dict[str, Stateful] = {}
        self._loader: AdaptiveLoader | None = None
        self._tuner: Tuner | None = None
        self._trainee: Trainee | None = None
        self._is_closed = False
        self._signals.install()
        atexit.register(self.close)

    # --- present values -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self._session.membership.rank

    @property
    def world_size(self) -> int:
        return self._session.membership.world_size

    @property
    def generation(self) -> int:
        """The number of the present membership of replicas; -1 before this replica has joined."""
        return self._session.generation

    @property
    def noise_scale(self) -> float:
        """φ in examples, smoothed; NaN before the first measurement."""
        return float("nan") if self._exchange.noise is None else self._exchange.noise.noise_scale

    @property
    def noise_scale_error(self) -> float:
        """The standard error of φ, in examples; NaN before the first measurement."""
        return float("nan") if self._exchange.noise is None else self._exchange.noise.error

    @property
    def norm_noise_scale(self) -> float:
        """φ of the normalisation layers' weights, on rank 0, to check ``noise_scale``; NaN if there are none."""
        noise = None if self._session.state is None else self._session.state.norm_noise.noise
        return float("nan") if noise is None else noise.noise_scale

    @property
    def norm_noise_scale_error(self) -> float:
        """The standard error of ``norm_noise_scale``, in examples; NaN if there is none."""
        noise = None if self._session.state is None else self._session.state.norm_noise.noise
        return float("nan") if noise is None else noise.error

    @property
    def measured_every(self) -> int:
        """Steps between measurements of the noise scale, chosen by their cost."""
        return 1 if self._session.state is None else self._session.state.interval

    @property
    def num_steps(self) -> int:
        """Optimizer steps so far, resizes and restarts included."""
        return self._progress.num_steps

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def batch(self) -> BatchChoice | None:
        """The batch of the next step; None before the loop."""
        return None if self._session.state is None else self._session.state.choice

    @property
    def is_exploring(self) -> bool:
        """Whether larger device batches are being timed. The batch goes back when that is done."""
        return self._tuner is not None and self.batch is not None and not self._tuner.explorer.is_done

    @property
    def learning_rate_factor(self) -> float:
        """The factor on the learning rates in the last step."""
        return 1.0 if self._trainee is None else self._trainee.rate.factor

    # --- setting up ---------------------------------------------------------------------------------------------

    def dataloader(
        self,
        dataset: Dataset[object],
        batch_size: int = 1,
        *,
        max_batch_size: int | None = None,
        device_batch_size: int | tuple[int, int] | None = None,
        policy: str | BatchPolicy | None = None,
        **options: Any,
    ) -> AdaptiveLoader:
        """The training data. ``batch_size`` is M0, for which the learning rate was tuned.

        With ``max_batch_size`` the batch adapts between the two; ``device_batch_size`` bounds what one device takes in
        one pass. ``policy`` is "adaptive", "fixed" or "linear" (see :mod:`pollux.train.batching`) or your own object;
        without ``max_batch_size`` it is "fixed". Other options are those of
        :class:`~pollux.train.data.ElasticLoader` (shuffle, seed, sampler, batch_sampler, collate_fn, num_workers,
        pin_memory, drop_last, ...).

        One per run. Use torch's own DataLoader for evaluation data.
        """
        if self._loader is not None:
            raise InvalidValueError(
                "run.dataloader was called before: a run trains on one loader; use torch's DataLoader for evaluation"
            )
        limits = make_limits(batch_size, max_batch_size, device_batch_size)
        has_batches = options.get("batch_sampler") is not None
        if policy is None:
            policy = "fixed" if max_batch_size is None or has_batches else "adaptive"
        tuner = Tuner(limits, batch_policy(policy), self.device)
        length = None if has_batches or options.get("drop_last") else length_of(options.get("sampler") or dataset)
        shape = shape_of(tuner.choose(None, 0, 0, None), 1, 0, length or None)
        elastic = ElasticLoader(dataset, shape, share_order=self._team.share, **options)
        self._tuner, self._loader = tuner, AdaptiveLoader(elastic, self._session, self._complete)
        return self._loader

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Stateful | None = None,
        *,
        scaling: str | ScalingRule = "auto",
        grad_scaler: torch.amp.GradScaler | None = None,
        **ddp_options: Any,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Returns the replicated model and the optimizer.

        The loop steps ``lr_scheduler`` as before, after batches or between epochs. The schedule follows progress, so
        one call may take several steps at once, or none. ``scaling`` is the learning-rate rule ("auto", "adascale",
        "sqrt", "linear", "none", or an object; see :mod:`pollux.train.scaling`). ``grad_scaler`` is a
        torch.amp.GradScaler, if the loop uses one. Other options go to
        DistributedDataParallel (``find_unused_parameters``, ``static_graph``, ``bucket_cap_mb``). Compile the model
        before, not after.
        """
        if self._trainee is not None:
            raise InvalidValueError("run.prepare was called before: a run trains one model (put several into one)")
        session = self._session
        self._trainee = Trainee(model, optimizer, lr_scheduler, grad_scaler, scaling, self._team, session, ddp_options)
        return self._trainee.model, optimizer

    def track(self, name: str, stateful: Stateful) -> None:
        """Keep more state in checkpoints and resizes: any object with state_dict and load_state_dict."""
        if name in self._tracked:
            raise InvalidValueError(f"{name!r} is tracked already; choose another name")
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(stateful, method, None)):
                raise InvalidValueError(f"{type(stateful).__name__} has no {method}(): it cannot be tracked")
        if self._session.is_started:
            raise InvalidValueError(f"run.track({name!r}, ...) was called after the loop began: call it before")
        flatten({name: stateful.state_dict()})  # what cannot be saved is told now, not at the first checkpoint
        self._tracked[name] = stateful

    # --- training -----------------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int, *, by: str = "progress") -> Iterator[int]:
        """Passes over the data, numbered from 0, starting where an interrupted run stopped.

        ``by="progress"``: as much progress as ``num_epochs`` passes at M0. Larger batches teach less per example and
        need more passes (rounded to whole ones; exactly ``num_epochs`` if the batch never exceeds M0).
        ``by="passes"``: exactly ``num_epochs`` passes.
        """
        if num_epochs < 0:
            raise InvalidValueError(f"{num_epochs} epochs; 0 or more are needed")
        if by not in ("progress", "passes"):
            raise InvalidValueError(f"by={by!r}; 'progress' or 'passes' is needed")
        state, session = self._complete(), self._session
        asked = session.num_epochs = num_epochs, by == "passes"
        session.start()
        if self._signals.is_given_back:  # after an earlier ``run.epochs``
            self._signals.install()
        while not self._progress.is_done(*asked):
            epoch = state.loader.epoch
            yield epoch
            session.end_pass()  # if ``break`` left the loop
            if state.loader.epoch == epoch:  # otherwise this replica took over the state of others in a later epoch
                self._progress.end_pass()
                state.loader.set_epoch(epoch + 1)
            state.tuner.timer.disturb()
        session.finish()

    def log(self, **metrics: object) -> None:
        """Report metrics, and write them to the log on rank 0."""
        if self._session.state is not None:
            self._session.state.metrics.update(metrics)
            loss = metrics.get("loss", metrics.get("train_loss"))
            if isinstance(loss, int | float):  # reading a tensor would wait for the device
                self._session.state.guard.add("loss", float(loss))
        if self.rank == 0:
            text = ", ".join(
                f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in metrics.items()
            )
            logger.info("epoch %d, step %d: %s", self._progress.num_passes, self.num_steps, text)
            self._session.report()

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Put this around the body of the loop to repeat steps that run out of memory or lose a peer. Optional.

        Out of memory: all replicas halve the device batch, and repeat the step with the same examples.
        """
        try:
            yield
        except RuntimeError as error:
            if not self._session.note_error(error):
                raise
        if self._session.redo is not None and self._trainee is not None:
            self._trainee.begin_again()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def close(self) -> None:
        """Release everything the run holds. Called when the process ends; may be called earlier, and twice."""
        if self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self.close)
        self._signals.restore()
        try:
            if self._session.checkpointer is not None:
                self._session.checkpointer.close()
        finally:
            if self._loader is not None:
                self._loader.elastic.close()
            if self._trainee is not None:
                self._trainee.detach()
            self._session.end_reports()
            self._session.membership.close()
            self._team.close()
            self._session.fence.end()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self) -> RunState:
        """The run's state, made when the loop begins."""
        if self._session.state is None:
            if self._loader is None or self._tuner is None or self._trainee is None:
                missing = "dataloader" if self._loader is None else "prepare"
                raise InvalidValueError(f"call run.{missing}(...) before the loop")
            if (rule := getattr(self._tuner.policy, "scaling", None)) is not None:
                self._trainee.follow(rule)
            self._session.state = RunState(
                device=self.device,
                loader=self._loader.elastic,
                trainee=self._trainee,
                tuner=self._tuner,
                exchange=self._exchange,
                progress=self._progress,
                tracked=self._tracked,
                choice=self._tuner.choose(None, 0, 0, None),
            )
        return self._session.state


def _may_publish(membership: Membership) -> bool:
    return not membership.is_fenced()


def _alone() -> Group:
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Group(generation=-1, attempt=0, rank=0, world_size=1, local_rank=0, num_nodes=1, store=store)
