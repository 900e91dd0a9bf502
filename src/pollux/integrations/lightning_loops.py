"""Lightning's fit loop over the epochs and the loader of a run. The strategy puts it in place of Lightning's own.

Lightning's loop asks for the next batch before it is done with this one, or counts batches to know the last one. Here
the next batch is asked for when all of this one is done, which is the step boundary; the end of an epoch is known when
the loader ends. Validation of an epoch comes then, after its last step is committed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from pollux.errors import InvalidValueError
from pollux.integrations.one_process import needs

with needs("lightning", "lightning"):
    from lightning.fabric.utilities.data import sized_len
    from lightning.pytorch.loops.fetchers import _DataFetcher
    from lightning.pytorch.loops.fit_loop import _FitLoop
    from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
    from lightning.pytorch.trainer import call
    from lightning.pytorch.trainer.connectors.data_connector import _request_dataloader
    from lightning.pytorch.utilities.combined_loader import CombinedLoader
    from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

if TYPE_CHECKING:
    from pollux.integrations.lightning import PolluxStrategy


class ElasticFetcher(_DataFetcher):
    """Gives the batches of the run's loader, each when it is asked for."""

    def __init__(self, loader: Any) -> None:
        super().__init__()
        self._loader = loader

    def __iter__(self) -> ElasticFetcher:
        self.iterator, self.fetched, self.done = iter(self._loader), 0, False
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._start_profiler()
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.done = True
            raise
        finally:
            self._stop_profiler()
        self.fetched += 1
        return batch, self.fetched - 1, 0

    def teardown(self) -> None:
        self.iterator = None


class ElasticEpochLoop(_TrainingEpochLoop):
    """One epoch. Lightning's batches are passes; it accumulates in all but the last one of a step."""

    def __init__(self, trainer: Any, strategy: PolluxStrategy) -> None:
        self._strategy = strategy
        self.has_stepped = False  # the optimizer, in the pass under way
        super().__init__(trainer, trainer.min_steps, trainer.max_steps)

    @property
    def global_step(self) -> int:
        """Steps of the optimizer, resizes and restarts included."""
        return self._strategy.run.num_steps + self.has_stepped

    @property
    def _batches_that_stepped(self) -> int:
        """The step number for loggers: of the step under way, or of the last one between epochs."""
        run = self._strategy.run
        return run.num_steps if self._strategy.is_in_pass else max(run.num_steps - 1, 0)

    @_batches_that_stepped.setter
    def _batches_that_stepped(self, value: int) -> None:
        """Lightning counts; here the run does."""

    def _should_accumulate(self) -> bool:
        return not self._strategy.run.is_last_pass

    def _num_ready_batches_reached(self) -> bool:
        return bool(self.batch_progress.is_last_batch)

    def on_run_start(self, data_fetcher: Any) -> None:
        iter(data_fetcher)
        data_fetcher._start_profiler, data_fetcher._stop_profiler = self._on_before_fetch, self._on_after_fetch

    def run(self, data_fetcher: Any) -> None:
        self.reset()
        self.on_run_start(data_fetcher)
        while not self.done:
            self.has_stepped, is_whole = False, False
            try:
                with self._strategy.run.attempt():
                    self.advance(data_fetcher)
                    is_whole = True
            except StopIteration:
                self._strategy.is_in_pass = False
                if data_fetcher.done:
                    self._end_epoch()
                break
            if is_whole:
                if self._should_accumulate():
                    self.trainer.strategy.optimizers[0].step()  # a gate: it notes the gradients of this pass
                self.on_advance_end(data_fetcher)
            self.on_iteration_done()
        self._strategy.is_in_pass = self.has_stepped = False

    def advance(self, data_fetcher: Any) -> None:
        self._strategy.is_in_pass = False
        batch = next(data_fetcher)
        self._strategy.begin_pass()
        super().advance(_Given(batch))

    def _end_epoch(self) -> None:
        self.batch_progress.is_last_batch = True
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        trainer = self.trainer
        if not self._should_check_val_epoch() or not self._validates_at_end():
            return
        trainer.validating = True
        is_first = trainer._logger_connector._first_loop_iter
        call._call_lightning_module_hook(trainer, "on_validation_model_zero_grad")
        self.val_loop.run()
        trainer.training = True
        trainer._logger_connector._first_loop_iter = is_first

    def _validates_at_end(self) -> bool:
        every, length = self.trainer.val_check_batch, self.trainer.fit_loop.max_batches
        return self.trainer.check_val_every_n_epoch is not None and every >= length

    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        """After a step in the middle of an epoch: counted in steps at M0, which all replicas know."""
        trainer = self.trainer
        if not self.has_stepped or not self._should_check_val_epoch():
            return False
        if trainer.should_stop and trainer.fit_loop._can_stop_early:
            return True
        if self._validates_at_end():
            return False
        progress, every = self._strategy.run.progress, int(trainer.val_check_batch)
        begun = 0 if trainer.check_val_every_n_epoch is None else progress.num_epochs * trainer.fit_loop.max_batches
        last = int(progress.iterations_before) if progress.num_steps else -1
        return bool((progress.step_number + 1 - begun) // every > max(last + 1 - begun, 0) // every)


class _Given(_DataFetcher):
    """One batch that was fetched already."""

    def __init__(self, batch: tuple[Any, int, int]) -> None:
        super().__init__()
        self._batch = batch

    def __next__(self) -> tuple[Any, int, int]:
        return self._batch


class ElasticFitLoop(_FitLoop):
    """All epochs. Takes the data sources of the loop whose place it takes."""

    def __init__(self, trainer: Any, strategy: PolluxStrategy) -> None:
        before = trainer.fit_loop
        super().__init__(trainer, before.min_epochs, before.max_epochs)
        self._strategy, self._data_source = strategy, before._data_source
        self.epoch_loop = ElasticEpochLoop(trainer, strategy)
        self.epoch_loop.val_loop = before.epoch_loop.val_loop

    def setup_data(self) -> None:
        """The user's loader, and how often to validate. The strategy makes the run's loader from it."""
        loaded: CombinedLoader | None = self._combined_loader  # type: ignore[has-type]
        if loaded is not None:
            return
        trainer = self.trainer
        if is_param_in_hook_signature(trainer.lightning_module.training_step, "dataloader_iter", explicit=True):
            raise InvalidValueError("training_step(dataloader_iter) reads ahead of the step; take batch and batch_idx")
        loader = _request_dataloader(self._data_source)
        if not isinstance(loader, DataLoader):
            raise InvalidValueError(
                f"the training data is a {type(loader).__name__}; one torch.utils.data.DataLoader is needed"
            )
        self._combined_loader = CombinedLoader(loader, "max_size_cycle")
        length = sized_len(loader)
        self.max_batches = float("inf") if length is None else length
        every = trainer.val_check_interval
        if isinstance(every, int):
            trainer.val_check_batch = every
        elif length is None and every != 1.0:
            raise InvalidValueError(f"val_check_interval={every} of a stream without a length; give a number of steps")
        else:
            trainer.val_check_batch = float("inf") if length is None else max(1, int(length * every))

    @property
    def num_epochs(self) -> int:
        """At most; ``max_steps`` may end the run before."""
        if self.max_steps == -1 or (self.max_epochs not in (None, -1)):
            return int(self.max_epochs)
        return -(-self.max_steps // int(max(self.max_batches, 1))) if self.max_batches != float("inf") else 1

    def run(self) -> None:
        self.setup_data()
        if self.skip:
            return
        self.reset()
        self._data_fetcher = ElasticFetcher(self._strategy.loader)
        epochs = self._strategy.run.epochs(self.num_epochs)
        has_begun = False
        for epoch in epochs:
            self._count(epoch)
            if not has_begun:  # the state of an interrupted run, or of the other replicas, is there now
                has_begun = True
                self._strategy.join()
                self.on_run_start()
            if self.done:
                break
            self.on_advance_start()
            self.advance()
            self.on_advance_end()
            self.on_iteration_done()
            if self.done and epoch + 1 < self.num_epochs:
                break
        if has_begun:
            self.on_run_end()

    def _count(self, epoch: int) -> None:
        """Lightning's counters, as the run knows them."""
        for counters in (self.epoch_progress.total, self.epoch_progress.current):
            counters.ready = counters.started = counters.processed = counters.completed = epoch
