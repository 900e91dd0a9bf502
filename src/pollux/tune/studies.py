"""All studies of a server: a thread that carries them out, and what HTTP routes ask of them.

The server makes one and starts it when its cluster runs. Without Optuna, or with a file that Optuna cannot read, the
server works as before; only what is asked of studies is refused, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pollux.api.copy import CopyAnswer, CopyNews
from pollux.api.study import StudyCurves, StudyDetail, StudyRequest, StudySummary
from pollux.errors import InvalidValueError, PolluxError, StoreError, UnknownNameError
from pollux.tune.copies import CopyDesk
from pollux.tune.ports import Jobs

if TYPE_CHECKING:  # they bring optuna, an extra
    from pollux.tune.driver import StudyDriver
    from pollux.tune.storage import StudyStorage

STUDIES_FILE = "studies.db"
EVERY_S = 0.25  # between two looks, unless a value comes
SHORTEST_S = 0.02
ANSWER_S = 10.0  # the longest a caller waits for the thread
STOP_S = 10.0
MISSING = 'studies need optuna, which is not installed here: pip install "pollux-scheduler[tune]"'

logger = logging.getLogger(__name__)


class Studies:
    """Any thread may ask; one lock guards all studies, and is held for a turn of one study at most."""

    def __init__(self, directory: Path, jobs: Jobs) -> None:
        self._path, self._jobs = directory / STUDIES_FILE, jobs
        self._lock, self._desk = threading.Lock(), CopyDesk(jobs.now)
        self._storage: StudyStorage | None = None
        self._drivers: dict[str, StudyDriver] = {}
        self._unreadable: dict[str, str] = {}  # why, by study
        self._problem = ""  # why there are no studies at all
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    # Life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Go on with what the server before left. Nothing is opened where there has never been a study."""
        if self._path.exists():
            with contextlib.suppress(PolluxError), self._turn():
                self._open()
        self._thread = threading.Thread(target=self._run, name="pollux-studies", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Studies go on with the next server."""
        self._stopping.set()
        self.wake()
        if self._thread is not None:
            self._thread.join(STOP_S)
        with contextlib.suppress(PolluxError), self._turn():
            if self._storage is not None:
                self._storage.close()
                self._storage = None
            self._drivers.clear()

    def wake(self) -> None:
        """A value came that a study waits for: look at once, not at the next turn."""
        self._woken.set()

    def _open(self) -> StudyStorage:
        if self._storage is not None:
            return self._storage
        if importlib.util.find_spec("optuna") is None:
            self._problem = MISSING
            raise InvalidValueError(MISSING)
        from pollux.tune.driver import StudyDriver
        from pollux.tune.storage import StudyStorage

        try:
            storage = StudyStorage(self._path)
            for name in storage.names():
                try:
                    self._drivers[name] = StudyDriver(storage.load(name), self._jobs, desk=self._desk)
                except StoreError as error:
                    self._unreadable[name] = str(error)
                    logger.error("%s", error)
        except StoreError as error:
            self._problem = f"{error}; move {self._path} away, or install the Optuna that wrote it"
            logger.error("no studies: %s", self._problem)
            raise StoreError(self._problem) from error
        self._storage, self._problem = storage, ""
        return storage

    def _run(self) -> None:
        said = ""
        while not self._stopping.is_set():
            self._woken.wait(EVERY_S)
            self._stopping.wait(SHORTEST_S)  # values that come together are seen together
            self._woken.clear()
            for name in list(self._drivers):
                try:
                    with self._turn():
                        if (driver := self._drivers.get(name)) is not None and not self._stopping.is_set():
                            driver.step()
                    said = ""
                except Exception as error:  # crash-only: the study begins again from what is kept
                    if str(error) != said:
                        said = str(error)
                        logger.exception("study %s stumbled; it begins again from what was kept", name)
                    self._stopping.wait(1.0)
                    self._reload(name)

    def _reload(self, name: str) -> None:
        from pollux.tune.driver import StudyDriver

        with contextlib.suppress(PolluxError), self._turn():
            if self._storage is not None:
                self._drivers[name] = StudyDriver(self._storage.load(name), self._jobs, desk=self._desk)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=ANSWER_S):
            raise StoreError(f"no answer from the studies in {ANSWER_S:g} s; try again")
        try:
            yield
        finally:
            self._lock.release()

    # Asked by routes --------------------------------------------------------------------------

    def create(self, request: StudyRequest) -> StudySummary:
        """Keep a study and begin it.

        Raises:
            InvalidValueError: there is one of that name, or optuna is missing.
        """
        from pollux.tune.views import summary

        with self._turn():
            storage = self._open()
            from pollux.tune.driver import StudyDriver

            if request.name in self._unreadable:
                raise InvalidValueError(f"a study named {request.name!r} exists; choose another name")
            driver = StudyDriver(storage.create(request, self._jobs.now()), self._jobs, desk=self._desk)
            self._drivers[request.name] = driver
            logger.info("study %s: %d trials for %s", request.name, request.trials, request.metric)
            return summary(driver)

    def all(self) -> list[StudySummary]:
        if not self._path.exists():
            return []
        with self._turn():
            self._open()
            from pollux.tune.views import summary, unreadable

            found = [summary(driver) for driver in self._drivers.values()]
            return [*found, *(unreadable(name, why) for name, why in self._unreadable.items())]

    def one(self, name: str) -> StudyDetail:
        with self._turn():
            driver = self._driver(name)
            from pollux.tune.views import detail

            return detail(driver, self._open().url)

    def owner_of(self, name: str) -> str:
        """The user whose jobs its trials are; empty without users."""
        with self._turn():
            return self._driver(name).request.job.owner

    def curves(self, name: str) -> StudyCurves:
        with self._turn():
            driver = self._driver(name)
            from pollux.tune.views import curves

            return curves(driver)

    def csv(self, name: str) -> str:
        with self._turn():
            driver = self._driver(name)
            from pollux.tune.views import as_csv

            return as_csv(driver)

    def copy_news(self, job: str, news: CopyNews) -> None:
        """What a trial's job tells of copies between trials; any other job's news is ignored. Never waits."""
        if self._jobs.study_of(job) == news.study:
            self._desk.take(job, news)

    def copy_answer(self, job: str, news: CopyNews) -> CopyAnswer:
        """What it is to do. Never waits."""
        driver = self._drivers.get(news.study)  # unknown for a moment after the server's start
        if driver is not None and not driver.request.uses_copies:
            return CopyAnswer(again=False)
        return CopyAnswer(order=self._desk.order_for(job))

    def stop_study(self, name: str) -> StudySummary:
        """End its trials. One that is over stays as it is."""
        with self._turn():
            driver = self._driver(name)
            driver.stop()
            from pollux.tune.views import summary

            return summary(driver)

    def resume(self, name: str, num_trials: int | None) -> StudySummary:
        """Go on with a study that was stopped, failed or finished.

        Raises:
            InvalidValueError: it has all its trials already, and no more were asked for.
        """
        with self._turn():
            driver = self._driver(name)
            driver.resume(num_trials)
            from pollux.tune.views import summary

            return summary(driver)

    def _driver(self, name: str) -> StudyDriver:
        if self._path.exists():
            self._open()
        if name in self._unreadable:
            raise StoreError(self._unreadable[name])
        if name not in self._drivers:
            raise UnknownNameError("study", name, [*self._drivers, *self._unreadable])
        return self._drivers[name]
