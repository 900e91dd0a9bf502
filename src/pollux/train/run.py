"""The run that ``train.init()`` returns: the interface that a training script uses.

It makes the other objects of ``train``. :mod:`pollux.train.session` handles what happens between two steps.
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from pollux.errors import InvalidValueError
from pollux.membership.replica import Membership, membership_from_environment
from pollux.membership.stacks import write_stacks_on_signal
from pollux.train.batching import BatchChoice, BatchPolicy, batch_policy, make_limits, shape_of
from pollux.train.branch_check import BranchCheck
from pollux.train.checkpoint import CheckpointDirectory
from pollux.train.checkpointer import Checkpointer
from pollux.train.data import ElasticLoader
from pollux.train.http_report import HttpReporter
from pollux.train.leaving import LeaveSignals
from pollux.train.live import LiveFlag, Rank
from pollux.train.loader import AdaptiveLoader, check_options
from pollux.train.order import length_of
from pollux.train.output import PrintOnce, check_whole, save_file
from pollux.train.progress import Goal, Progress
from pollux.train.report import FileReporter, Reporter
from pollux.train.run_state import RunState
from pollux.train.scaling import ScalingRule
from pollux.train.session import Session
from pollux.train.sharded_gradients import ShardedGradients
from pollux.train.sharded_module import ShardFunction
from pollux.train.state import Stateful, as_stateful, flatten
from pollux.train.step_exchange import StepExchange
from pollux.train.team import Team, lone_group
from pollux.train.trainees import Trainees, index_of, parts_of
from pollux.train.trial import Trial
from pollux.train.tuner import Tuner, pick_device, use_device

logger = logging.getLogger(__name__)
_V = TypeVar("_V", bool, int, float, str)
_S = TypeVar("_S", bound=Stateful | dict[str, Any])


def init(
    *,
    checkpoint_dir: str | Path | None = None,
    checkpoint_every_s: float | None = None,
    device: str | torch.device | None = None,
    membership: Membership | None = None,
    reporter: Reporter | None = None,
    timeout_s: float = 600.0,
    print_once: bool = False,
) -> Run:
    """Begin a run: alone, under torchrun, or in a cluster, depending on the environment.

    ``checkpoint_dir`` (or POLLUX_CHECKPOINT_DIR) is where checkpoints are saved and where an interrupted run resumes;
    without it there are no checkpoints. It is a folder, or a URL that fsspec opens, such as s3://bucket/path.
    ``checkpoint_every_s`` sets the interval between checkpoints, which otherwise follows from their cost. ``device`` is
    this replica's GPU if there is one. ``timeout_s`` bounds every wait for other replicas. ``print_once``: Python's
    ``print`` prints on one replica, wherever the script calls it.
    """
    environment = os.environ
    if environment.get("POLLUX_REPLICA_ID"):
        write_stacks_on_signal()
    checkpoint_dir = checkpoint_dir or environment.get("POLLUX_CHECKPOINT_DIR") or None
    if reporter is None and environment.get("POLLUX_REPORT_FILE"):
        reporter = FileReporter(environment["POLLUX_REPORT_FILE"])
    if reporter is None:
        reporter = HttpReporter.from_environment(environment)
    membership = membership or membership_from_environment(environment)
    if environment.get("POLLUX_JOB_ID") and not membership.is_elastic and membership.rank == 0:
        logger.warning(
            "%s is a fixed job of %d replicas, which Pollux does not resize: pollux.train was not seen in the script "
            "or the files beside it. Submit it with --kind elastic, or write #POLLUX --kind elastic at its top",
            environment["POLLUX_JOB_ID"],
            membership.world_size,
        )
    device = pick_device(device, membership.local_rank)
    if checkpoint_every_s is not None and not checkpoint_every_s > 0:
        raise InvalidValueError(f"checkpoint_every_s is {checkpoint_every_s}; it must be a positive number of seconds")
    checkpointer = None
    if checkpoint_dir is not None:
        directory = CheckpointDirectory(checkpoint_dir, may_publish=partial(_may_publish, membership))
        checkpointer = Checkpointer(directory, checkpoint_every_s)
    run = Run(membership, device, checkpointer, reporter, timeout_s, Trial.from_environment(environment))
    if print_once:
        run.print_once()
    return run


class Run:
    """One training run as one replica sees it. Made by :func:`init`."""

    def __init__(
        self,
        membership: Membership,
        device: torch.device,
        checkpointer: Checkpointer | None,
        reporter: Reporter | None,
        timeout_s: float,
        trial: Trial | None = None,
    ) -> None:
        use_device(device)
        self.device, self._trial = device, trial or Trial()
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
            self._team.form(lone_group())
            self._team.warm_up()
        else:
            self._team.form(membership.join(timeout_s))
        self._signals = LeaveSignals()
        self._session = Session(membership, self._team, self._signals, checkpointer, reporter, timeout_s)
        if isinstance(reporter, HttpReporter):
            reporter.on_fenced = self._session.fence.on_refused
        self._exchange = StepExchange(self._team)
        self._progress = Progress()
        self._tracked: dict[str, Stateful] = {}
        self._loader: AdaptiveLoader | None = None
        self._tuner: Tuner | None = None
        self._branch = BranchCheck()
        self._trainees: Trainees | None = None
        self._is_closed = False
        self._printing: PrintOnce | None = None
        self._signals.install()
        atexit.register(self.close)

    # --- present values -----------------------------------------------------------------------------------------

    @property
    def rank(self) -> Rank:
        """This replica's rank. It may change at a resize; comparisons such as ``run.rank == 0`` then stay right."""
        return Rank(self._live_rank)

    @property
    def is_main(self) -> LiveFlag:
        """Whether this replica is rank 0: the one that prints, evaluates and saves. Right whenever it is asked."""
        return LiveFlag(lambda: self._live_rank() == 0)

    def _live_rank(self) -> int:
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
    def noise_scales(self) -> list[float]:
        """φ of each model that was prepared, in examples; NaN before the first measurement."""
        noises = (channel.noise for channel in self._exchange.channels)
        return [float("nan") if noise is None else noise.noise_scale for noise in noises]

    @property
    def is_last_pass(self) -> bool:
        """Whether the optimizer steps after the pass under way."""
        return self._session.is_last_pass()

    @property
    def local_batch_size(self) -> int:
        """How many examples this replica brings for the pass under way, in a loop over ``run.steps``; at least 1."""
        current = self._session.current
        if current is None:
            raise InvalidValueError("run.local_batch_size is known inside the loop over run.steps(...) only")
        return max(current.num_examples, self._session.least_examples)

    @property
    def steps_per_epoch(self) -> int:
        """Steps per epoch at M0; for schedules over steps. The same as ``len(loader)``."""
        if self._loader is None:
            raise InvalidValueError("call run.dataloader(...) before run.steps_per_epoch")
        return len(self._loader)

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
        return 1.0 if self._trainees is None else self._trainees.members[self._exchange.lead].rate.factor

    def param(self, name: str, default: _V) -> _V:
        """The present value of a parameter of the study that this run is a trial of; ``default`` elsewhere."""
        return self._trial.param(name, default)

    def on_new_params(self, function: Callable[[], object]) -> None:
        """Call ``function`` on every replica when the study has given this run other parameters. See docs/tune.md."""
        self._trial.on_params.append(function)

    # --- setting up ---------------------------------------------------------------------------------------------

    def dataloader(
        self,
        dataset: Dataset[object],
        batch_size: int = 1,
        *,
        max_batch_size: int | None = None,
        device_batch_size: int | tuple[int, int] | None = None,
        policy: str | BatchPolicy | None = None,
        batch_check: str | None = None,
        **options: Any,
    ) -> AdaptiveLoader:
        """The training data. ``batch_size`` is M0, for which the learning rate was tuned.

        With ``max_batch_size`` the batch adapts between the two; ``device_batch_size`` bounds what one device takes in
        one pass. ``policy`` is "adaptive", "fixed" or "linear" (see :mod:`pollux.train.batching`) or your own object;
        without ``max_batch_size`` it is "fixed". With ``batch_check="branch"`` each larger batch is first tried beside
        the present one, from the same state on the same examples (see :mod:`pollux.train.branch_check`). Other options
        are those of :class:`~pollux.train.data.ElasticLoader` (shuffle, seed, sampler, batch_sampler, collate_fn,
        num_workers, pin_memory, drop_last, ...).

        One per run. Use torch's own DataLoader for evaluation data.
        """
        if self._loader is not None:
            raise InvalidValueError(
                "run.dataloader was called before: a run trains on one loader; use torch's DataLoader for evaluation"
            )
        check_options(options, Run.dataloader)
        self._branch = BranchCheck.named(batch_check)
        return self._make_loader(dataset, batch_size, max_batch_size, device_batch_size, policy, options)

    def _make_loader(
        self,
        dataset: Dataset[object] | None,
        batch_size: int,
        max_batch_size: int | None,
        device_batch_size: int | tuple[int, int] | None,
        policy: str | BatchPolicy | None,
        options: dict[str, Any],
    ) -> AdaptiveLoader:
        limits = make_limits(batch_size, max_batch_size, device_batch_size)
        has_batches = options.get("batch_sampler") is not None
        if policy is None:
            policy = "fixed" if max_batch_size is None or has_batches else "adaptive"
        tuner = Tuner(limits, batch_policy(policy), self.device)
        length = None
        if dataset is not None and not has_batches and not options.get("drop_last"):
            length = length_of(dataset if options.get("sampler") is None else options["sampler"])
        shape = shape_of(tuner.choose(None, 0, 0, None), 1, 0, length or None)
        elastic = ElasticLoader(dataset, shape, share_order=self._team.share, **options)
        self._tuner = tuner
        self._loader = AdaptiveLoader(elastic, self._session, self._complete, dataset, batch_size, options)
        return self._loader

    def prepare(
        self,
        model: Any,
        optimizer: Any,
        lr_scheduler: Any = None,
        *,
        scaling: str | ScalingRule | Sequence[str | ScalingRule] = "auto",
        grad_scaler: torch.amp.GradScaler | None = None,
        drives: nn.Module | None = None,
        shard: ShardFunction | None = None,
        shard_copies: int = 1,
        **ddp_options: Any,
    ) -> tuple[Any, Any]:
        """Returns the replicated model and the optimizer. Several models: tuples of models and of their optimizers.

        The loop steps ``lr_scheduler`` as before, after batches or between epochs. The schedule follows progress, so
        one call may take several steps at once, or none. ``scaling`` is the learning-rate rule ("auto", "adascale",
        "sqrt", "linear", "none", or an object; see :mod:`pollux.train.scaling`). ``grad_scaler`` is a
        torch.amp.GradScaler, if the loop uses one. ``drives`` is the one of several models whose noise scale decides
        the batch; without it, the one with the largest. Other options go to
        DistributedDataParallel (``find_unused_parameters``, ``static_graph``, ``bucket_cap_mb``). Compile the model
        before, not after.

        ``shard`` is a function of the model and a mesh that calls torch's ``fully_shard``: the model is then sharded
        over the replicas instead of replicated, and again at each resize. ``shard_copies`` replicas hold each shard,
        where their number allows it. See docs/fsdp.md.
        """
        if self._trainees is not None:
            raise InvalidValueError(
                "run.prepare was called before: give it all models at once, as tuples: "
                "(a, b), (opt_a, opt_b) = run.prepare((a, b), (opt_a, opt_b))"
            )
        parts = parts_of(model, optimizer, lr_scheduler, scaling, shard, shard_copies)
        if shard is not None and self._session.checkpointer is not None:
            self._session.checkpointer.check_shared()
        driver = index_of(drives, parts)
        self._trainees = Trainees(parts, grad_scaler, self._team, self._session, ddp_options, driver)
        self._exchange.open(self._trainees.steps_averaged, driver, is_sharded=shard is not None)
        models = tuple(member.model for member in self._trainees.members)
        return models if isinstance(model, list | tuple) else models[0], optimizer

    def track(self, name: str, stateful: _S) -> _S:
        """Keep more state: a dictionary, or an object with state_dict and load_state_dict. Returns it."""
        if name in self._tracked:
            raise InvalidValueError(f"{name!r} is tracked already; choose another name")
        kept = as_stateful(stateful)
        if self._session.is_started:
            raise InvalidValueError(f"run.track({name!r}, ...) was called after the loop began: call it before")
        flatten({name: kept.state_dict()})  # what cannot be saved is told now, not at the first checkpoint
        self._tracked[name] = kept
        return stateful

    # --- training -----------------------------------------------------------------------------------------------

    def epochs(self, num_epochs: int, *, by: str = "progress") -> Iterator[int]:
        """The epochs from 0 to ``num_epochs - 1``, starting where an interrupted run stopped.

        ``by="progress"``: each epoch is as much progress as one pass at M0. Larger batches teach less per example, so
        an epoch may need several passes over the data (whole ones; exactly one if the batch never exceeds M0).
        ``by="passes"``: each epoch is one pass.
        """
        if num_epochs < 0:
            raise InvalidValueError(f"{num_epochs} epochs; 0 or more are needed")
        if by not in ("progress", "passes"):
            raise InvalidValueError(f"by={by!r}; 'progress' or 'passes' is needed")
        goal = self._begin(Goal(num_epochs, "passes" if by == "passes" else "epochs"))
        session, progress = self._session, self._progress
        while not progress.is_done(goal):
            epoch = progress.num_epochs
            yield epoch
            session.end_pass()  # if ``break`` left the loop
            if progress.num_epochs == epoch:  # otherwise this replica took over the state of others in a later epoch
                session.next_pass()
                progress.end_epoch()
        session.finish()

    def steps(
        self,
        num_steps: int,
        batch_size: int | None = None,
        *,
        max_batch_size: int | None = None,
        device_batch_size: int | tuple[int, int] | None = None,
        policy: str | BatchPolicy | None = None,
        by: str = "progress",
    ) -> Iterator[int]:
        """For loops that count steps: gives the number of the step under way, once per pass.

        With ``batch_size`` the loop brings its own batch, of ``run.local_batch_size`` examples in each pass; M0 is
        ``batch_size``, and the other options are those of :meth:`dataloader`. Without it, the loop reads the loader
        with ``next``.

        ``by="progress"``: ``num_steps`` steps at M0, or as much progress with larger batches. A step that is worth
        three then advances the number by three, so use ``run.every(n)`` in place of ``step % n == 0``.
        ``by="steps"``: exactly ``num_steps`` steps of the optimizer.
        """
        if num_steps < 0:
            raise InvalidValueError(f"{num_steps} steps; 0 or more are needed")
        if by not in ("progress", "steps"):
            raise InvalidValueError(f"by={by!r}; 'progress' or 'steps' is needed")
        if batch_size is not None and self._loader is None:
            self._make_loader(None, batch_size, max_batch_size, device_batch_size, policy, {})
        elif batch_size is not None and self._session.is_started is False:
            raise InvalidValueError(
                "run.steps(batch_size=...) is for a loop with its own batches; this run has a loader"
            )
        goal = self._begin(Goal(num_steps, "steps" if by == "steps" else "progress_steps"))
        loader, progress = self._loader, self._progress
        assert loader is not None
        batches = iter(loader) if loader.dataset is None else None
        while not progress.is_done(goal):
            if batches is not None:
                next(batches)
            yield progress.step_number if by == "progress" else progress.num_steps
            self._session.end_pass()
        self._session.finish()

    def _begin(self, goal: Goal) -> Goal:
        self._complete()
        self._session.goal = goal
        self._session.start()
        if self._signals.is_given_back:  # after an earlier ``run.epochs``
            self._signals.install()
        return goal

    def every(self, num_steps: int) -> bool:
        """Whether something that is done every ``num_steps`` steps is due: once, in the last pass of a step.

        Steps are counted as by :meth:`steps`, resizes and restarts included; the first step counts.
        """
        if num_steps < 1:
            raise InvalidValueError(f"every {num_steps} steps; at least 1 is needed")
        return self._session.is_last_pass() and self._progress.has_passed_multiple(num_steps)

    # --- results ------------------------------------------------------------------------------------------------

    @overload
    def sum(self, value: float | Tensor, /) -> float: ...

    @overload
    def sum(self, *values: float | Tensor) -> list[float]: ...

    def sum(self, *values: float | Tensor) -> float | list[float]:
        """The values added up over all replicas: one number, or a list for several.

        All replicas must call it at the same point of the script, in the loop or after it. It survives a lost peer.
        """
        if not values:
            raise InvalidValueError("run.sum() was given no value; at least 1 is needed")
        if self._session.membership.is_elastic and not self._session.is_started:
            raise InvalidValueError(
                "run.sum and run.mean were called before the loop: replicas that join later would wait for the others"
            )
        sums = self._session.add_over_replicas([float(value) for value in values])
        return sums[0] if len(values) == 1 else list(sums)

    def mean(self, value: float | Tensor, weight: float = 1.0) -> float:
        """The mean over replicas, each with its weight, such as its number of examples; NaN if all weights are 0."""
        total, weights = self.sum(float(value) * weight if weight else 0.0, weight)
        return total / weights if weights else float("nan")

    def print(self, *values: object, **options: Any) -> None:
        """``print`` on one replica, at once."""
        if self.is_main:
            print(*values, **{"flush": True, **options})

    def print_once(self) -> None:
        """Make Python's ``print`` print on one replica, until :meth:`close`."""
        if self._printing is None:
            self._printing = PrintOnce(self.is_main)

    def save(self, obj: object, path: str | Path) -> None:
        """``torch.save`` on one replica, whole or not at all, with the user's own modules and the plain names.

        For results; checkpoints are written by themselves (``train.init(checkpoint_dir=...)``).
        """
        check_whole(obj)
        if self.is_main and _may_publish(self._session.membership):
            save_file(obj, path)

    def log(self, **metrics: object) -> None:
        """Report metrics, and write them to the log on rank 0."""
        if self._session.state is not None:
            self._session.state.metrics.update(metrics)
            self._trial.observe(metrics, self._session.state.share_done(self._session.goal))
            loss = metrics.get("loss", metrics.get("train_loss"))
            # Reading a tensor would wait for the device. A branch may be given up, and has a batch of its own.
            if isinstance(loss, int | float) and not self._session.state.branch.is_under_way:
                self._session.state.guard.add("loss", float(loss))
        if self.rank == 0:
            text = ", ".join(
                f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in metrics.items()
            )
            logger.info("epoch %d, step %d: %s", self._progress.num_epochs, self.num_steps, text)
            self._session.report()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_`` for the prepared model, sharded or not; the norm before.

        torch's own function works too. For a sharded model it is a collective that raises if a peer is lost in it.
        """
        if self._trainees is None or len(self._trainees) != 1:
            raise InvalidValueError("run.clip_grad_norm_ is for one prepared model; use torch.nn.utils for several")
        trainee = self._trainees.members[0]
        if isinstance(trainee.hook, ShardedGradients):
            return trainee.hook.clip(max_norm)
        return torch.nn.utils.clip_grad_norm_(trainee.module.parameters(), max_norm)

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Put this around the body of the loop to repeat steps that run out of memory or lose a peer. Optional.

        Out of memory: all replicas halve the device batch, and repeat the step with the same examples.
        """
        is_out_of_memory = False
        try:
            yield
        except RuntimeError as error:
            if not self._session.note_error(error):
                raise
            is_out_of_memory = isinstance(error, torch.OutOfMemoryError)
        if self._session.redo is not None and self._trainees is not None:
            self._trainees.begin_again()
            if is_out_of_memory:
                self._team.release_memory()

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
            if self._trainees is not None:
                self._trainees.detach()
            self._session.reporter.close()
            self._trial.close()
            self._session.membership.close()
            self._team.close()
            self._session.fence.end()
            if self._printing is not None:
                self._printing.end()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _complete(self) -> RunState:
        """The run's state, made when the loop begins."""
        if self._session.state is None:
            if self._loader is None or self._tuner is None or self._trainees is None:
                missing = "dataloader" if self._loader is None else "prepare"
                raise InvalidValueError(f"call run.{missing}(...) before the loop")
            self._trainees.follow(getattr(self._tuner.policy, "scaling", None))
            self._tuner.bound_total(self._trainees.most_of(self._tuner.limits))
            self._session.state = RunState(
                device=self.device,
                loader=self._loader.elastic,
                trainees=self._trainees,
                tuner=self._tuner,
                exchange=self._exchange,
                progress=self._progress,
                tracked=self._tracked,
                choice=self._tuner.choose(None, 0, 0, None),
                trial=self._trial,
                branch=self._branch,
            )
        return self._session.state


def _may_publish(membership: Membership) -> bool:
    return not membership.is_fenced()
