"""Makes the cluster that is served, as the configuration says: a table of jobs, an engine, the scheduler on it.

:class:`pollux.server.service.Service` calls it. What an engine needs before the server listens (a Ray cluster to join,
the address by which nodes reach us) is :func:`prepared`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from pollux.api.constraint import parse_label
from pollux.engines.launch import Launch
from pollux.engines.live import LiveEngine
from pollux.errors import InvalidValueError
from pollux.scheduler.ports import NodePool
from pollux.server.config import SECRET_FILE, ClusterConfig, ServiceConfig
from pollux.server.http.auth import load_token
from pollux.server.http.dependencies import ServedCluster
from pollux.server.live.job_table import JobTable, launch_settings
from pollux.server.storage.files import (
    SETTINGS_FILE,
    DecisionSettings,
    read_object,
    write_decision_settings,
    write_object,
)
from pollux.server.storage.store import SqlStore
from pollux.types import Node

STORAGE_FILE = "storage.json"
_OWN_VARIABLE = re.compile(
    "(POLLUX|TORCHELASTIC)_.*|MASTER_(ADDR|PORT)|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|"
    # Of the Ray cluster and the database: no job may have them.
    "RAY_AUTH_(MODE|TOKEN|TOKEN_PATH)|RAY_USE_TLS|RAY_TLS_.*|PGPASS(WORD|FILE)"
)
_E = TypeVar("_E", bound=LiveEngine)

ClusterMaker = Callable[[ServiceConfig, SqlStore, str], ServedCluster]
"""Makes a cluster that keeps its jobs in the store and is reached at a URL."""

EngineMaker = Callable[[Callable[[str], Launch], Callable[[], None]], _E]
"""Makes an engine, given how to start a job and what to call when something happened."""

logger = logging.getLogger(__name__)


def make_cluster(config: ServiceConfig, store: SqlStore, url: str) -> ServedCluster:
    """As the configuration says."""
    return (make_ray_cluster if config.engine == "ray" else make_local_cluster)(config, store, url)


def make_local_cluster(config: ServiceConfig, store: SqlStore, url: str) -> ServedCluster:
    """The one of this machine: processes in its GPUs or CPU slots."""
    from pollux.engines.local.described import check_labels
    from pollux.engines.local.engine import LocalEngine
    from pollux.engines.processes.layout import LayoutRequest, SlotBook, detect_nodes

    nodes, devices = detect_nodes(config.slots, config.nodes, slots_per_gpu=config.slots_per_gpu)
    layout = LayoutRequest(
        nodes=config.nodes, slots_per_gpu=config.slots_per_gpu, visible=os.environ.get("CUDA_VISIBLE_DEVICES")
    )
    had_gpus = config.slots is None and SlotBook(config.data_directory).has_seen_gpus
    if had_gpus and all(device.gpu is None for device in devices):
        logger.warning(
            "the GPUs that %s was used with are gone: jobs wait for them; for CPU slots start with --slots N",
            config.data_directory,
        )
        nodes, devices = [], []
    labels = [parse_label(text) for text in config.labels]
    if nodes:
        check_labels(nodes, labels)

    def make_engine(launch_of: Callable[[str], Launch], on_event: Callable[[], None]) -> LocalEngine:
        return LocalEngine(
            config.data_directory,
            nodes=nodes,
            devices=devices,
            labels=labels,
            layout=layout if had_gpus or any(device.gpu for device in devices) else None,
            launch_of=launch_of,
            on_event=on_event,
            grace_s=config.grace_s,
            supervisor_options={"min-free-bytes": str(config.min_free_mib << 20)},
            epoch=store.epoch,
        )

    def no_pool(engine: LocalEngine) -> NodePool | None:
        return None  # its nodes neither come nor go

    return _make(config, store, url, make_engine, no_pool)


def make_ray_cluster(config: ServiceConfig, store: SqlStore, url: str) -> ServedCluster:
    """Many machines. ``config`` is :func:`prepared`."""
    from pollux.engines.ray.engine import RayEngine, RaySettings
    from pollux.engines.ray.heartbeat import LOST_AFTER_S

    assert config.address is not None, "prepared() comes first"
    settings = RaySettings(
        address=config.address,
        name=config.name,
        owner=owner_of(config),
        resource=config.resource,
        storage=keep_storage(config, store) or str(config.data_directory / "jobs"),
        min_free_bytes=config.min_free_mib << 20,
        lost_after_s=LOST_AFTER_S if config.lost_after_s is None else config.lost_after_s,
        is_scaled=config.autoscale is not None,
        epoch=store.epoch,
    )
    template = None
    if config.node_slots is not None:
        template = Node(name="new", num_slots=config.node_slots, accelerator="cpu")
    elif config.autoscale is not None and config.autoscale.types:
        template = config.autoscale.types[0].node

    def make_engine(launch_of: Callable[[str], Launch], on_event: Callable[[], None]) -> RayEngine:
        return RayEngine(
            config.data_directory,
            settings,
            template=template,
            launch_of=launch_of,
            on_event=on_event,
            grace_s=config.grace_s,
        )

    def pool_of(engine: RayEngine) -> NodePool | None:
        return engine if config.autoscale is not None else None

    return _make(config, store, url, make_engine, pool_of)


def _make(
    config: ServiceConfig,
    store: SqlStore,
    url: str,
    make_engine: EngineMaker[_E],
    pool_of: Callable[[_E], NodePool | None],
) -> ServedCluster:
    from pollux.server.live.cluster import Cluster

    described = _cluster_config(config, store, url)
    # The table of jobs and the event come first: both the engine and the cluster that commands it need them.
    jobs, wakeup = JobTable(store, launch_settings(described)), threading.Event()
    engine = make_engine(jobs.launch_of, wakeup.set)
    try:
        write_decision_settings(  # for a replay of what was decided
            config.data_directory / SETTINGS_FILE,
            DecisionSettings(
                policy=described.policy,
                interval_s=described.interval_s,
                resize_s=described.settings.resize_s,
                node_price=described.node_price,
                weights=described.settings.weights,
                p=described.settings.p,
            ),
        )
        return Cluster(store=store, engine=engine, config=described, jobs=jobs, wakeup=wakeup, pool=pool_of(engine))
    except BaseException:
        engine.close(stops_jobs=False)
        raise


def _cluster_config(config: ServiceConfig, store: SqlStore, url: str) -> ClusterConfig:
    return ClusterConfig(
        data_directory=config.data_directory,
        secret=load_token(config.data_directory / SECRET_FILE),
        url=url,
        certificate="" if config.tls_cert is None else config.tls_cert.read_text(encoding="ascii"),
        policy=config.policy,
        interval_s=config.interval_s,
        environment=environment_of_jobs(os.environ),
        engine_name=config.engine,
        storage=keep_storage(config, store),
        autoscale=config.autoscale,
        node_price=config.node_price,
        settings=config.settings,
        hang_timeout_s=config.hang_timeout_s,
        max_workdir_bytes=config.max_workdir_mib << 20,
        max_log_bytes=config.max_log_bytes,
        notify=config.notify,
    )


@contextlib.contextmanager
def prepared(config: ServiceConfig) -> Iterator[ServiceConfig]:
    """The configuration with nothing left open. Whatever was started for it ends if it is not used.

    Raises:
        EngineError: there is no Ray cluster, and none can be started.
    """
    if config.engine != "ray":
        yield config
        return
    if importlib.util.find_spec("ray") is None:
        raise InvalidValueError('the engine "ray" needs ray, not installed here: pip install "pollux-scheduler[ray]"')
    from pollux.engines.ray.head import HEAD_FILE, as_others_know_it, find_address, own_address, start_head, stop_head

    address = find_address(config.address, config.data_directory)
    # A head that was there before, and is only started again, keeps its books whatever happens here.
    is_new = address is None and not (config.data_directory / HEAD_FILE).exists()
    if address is None:
        # For the loopback Ray takes the address that this machine has among others.
        is_open = config.host in (None, "0.0.0.0", "::")
        address = start_head(config.data_directory, "127.0.0.1" if is_open else str(config.host))
    try:
        address = as_others_know_it(address)
        reached_at = own_address(address)
        yield dataclasses.replace(config, address=address, host=config.host or reached_at, reached_at=reached_at)
        is_new = False
    finally:
        if is_new:
            stop_head(config.data_directory)


def keep_storage(config: ServiceConfig, store: SqlStore) -> str | None:
    """Where checkpoints go: where it was said, else where they went before. None: into the data directory.

    Raises:
        InvalidValueError: jobs that are not over have theirs elsewhere, or it cannot be made.
    """
    path = config.data_directory / STORAGE_FILE
    kept = read_object(path)
    wanted = None if config.storage is None else f"{config.storage.rstrip('/')}/{config.name}-{owner_of(config)}"
    if config.storage is None:
        before = kept.get("storage")
        wanted = before if isinstance(before, str) else None
    elif kept and kept.get("storage") != wanted and store.active():
        raise InvalidValueError(
            f"jobs of {config.data_directory} that are not over have their checkpoints in "
            f"{kept.get('storage') or config.data_directory}: leave --storage out, and they go on from there"
        )
    if wanted is not None and "://" not in wanted:
        try:
            os.makedirs(wanted, exist_ok=True)
        except OSError as error:
            raise InvalidValueError(
                f"storage {wanted}: {error.strerror}; a folder is needed that all nodes can write to"
            ) from error
    write_object(path, {"storage": wanted})
    return wanted


def environment_of_jobs(environ: Mapping[str, str]) -> dict[str, str]:
    """What jobs inherit: nothing that would make a replica take itself for part of something else."""
    return {name: value for name, value in environ.items() if not _OWN_VARIABLE.fullmatch(name)}


def owner_of(config: ServiceConfig) -> str:
    """What tells the jobs of this data directory from all others."""
    secret = load_token(config.data_directory / SECRET_FILE)
    return hashlib.sha256(f"owner {secret}".encode()).hexdigest()[:12]
