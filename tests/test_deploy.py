"""What can be known of deploy/ without a cloud, Kubernetes or Slurm: it is well-formed, and names only what exists."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
yaml = pytest.importorskip("yaml")
typer = pytest.importorskip("typer")

from pollux.cli.app import app, load_command  # noqa: E402
from pollux.engines.ray.head import HEALTH_CHECKS  # noqa: E402
from tests.pages import ROOT  # noqa: E402

DEPLOY = ROOT / "deploy"
LAUNCHER = DEPLOY / "ray-cluster-launcher" / "cluster.yaml"
KUBERAY = DEPLOY / "kuberay" / "pollux.yaml"
SLURM = DEPLOY / "slurm" / "pollux.sbatch"
DOCKERFILE = DEPLOY / "Dockerfile"
PAGES = sorted((ROOT / "docs").glob("deploy-*.md"))

# Of KubeRay's RayCluster (ray.io/v1), as its operator's types name them.
CLUSTER_FIELDS = {
    *("autoscalerOptions", "enableInTreeAutoscaling", "gcsFaultToleranceOptions", "headGroupSpec"),
    *("headServiceAnnotations", "managedBy", "rayVersion", "suspend", "workerGroupSpecs"),
}
AUTOSCALER_FIELDS = {
    *("env", "envFrom", "idleTimeoutSeconds", "image", "imagePullPolicy", "resources"),
    *("securityContext", "upscalingMode", "volumeMounts"),
}
HEAD_FIELDS = {"enableIngress", "headService", "rayStartParams", "serviceType", "template"}
WORKER_FIELDS = {
    *("groupName", "idleTimeoutSeconds", "maxReplicas", "minReplicas", "numOfHosts", "rayStartParams"),
    *("replicas", "scaleStrategy", "suspend", "template"),
}


@pytest.fixture(scope="module")
def launcher() -> dict[str, Any]:
    return dict(yaml.safe_load(LAUNCHER.read_text()))


@pytest.fixture(scope="module")
def manifests() -> dict[tuple[str, str], dict[str, Any]]:
    found = yaml.safe_load_all(KUBERAY.read_text())
    return {(manifest["kind"], manifest["metadata"]["name"]): manifest for manifest in found}


@pytest.fixture(scope="module")
def cluster(manifests: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    return dict(manifests["RayCluster", "pollux"]["spec"])


def pods(cluster: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


def server_script(cluster: dict[str, Any]) -> str:
    head = next(pods(cluster))
    return str(next(container for container in head["containers"] if container["name"] == "pollux")["args"][0])


def commands_in(text: str, program: str) -> list[list[str]]:
    """Calls of a program in shell text: the words after its name, up to the end of the command."""
    found = []
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        for match in re.finditer(rf"(?:^|[\s`(]){program} (?=[a-z])", line):
            rest = re.split(r"[`;&|]|\$\(|\)", line[match.end() :])[0]
            found.append(shlex.split(rest.replace("'", "").replace('"', ""), comments=True))
    return found


def launcher_text(launcher: dict[str, Any]) -> str:
    return "\n".join((*launcher["head_start_ray_commands"], *launcher["worker_start_ray_commands"]))


# --- each kind by itself ---------------------------------------------------------------------------------------------


def test_launcher_configuration_is_what_ray_expects(launcher: dict[str, Any]) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(copy.deepcopy(launcher))
    validate_config(prepared)
    assert set(launcher) <= set(prepared)
    with pytest.raises(Exception, match="no_such_setting"):
        validate_config({**prepared, "no_such_setting": 1})


def test_launcher_nodes_fit_what_pollux_is_told(launcher: dict[str, Any]) -> None:
    worker = launcher["available_node_types"]["worker"]
    up = next(words for words in commands_in(launcher_text(launcher), "pollux") if words[0] == "up")
    assert option(up, "--node-slots") == str(worker["resources"]["GPU"])
    assert int(option(up, "--autoscale").split("..")[1]) == worker["max_workers"] == launcher["max_workers"]
    assert not any(launcher["available_node_types"][launcher["head_node_type"]]["resources"].values())


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_kuberay_fields_are_known(cluster: dict[str, Any]) -> None:
    assert set(cluster) <= CLUSTER_FIELDS
    assert set(cluster["autoscalerOptions"]) <= AUTOSCALER_FIELDS
    assert set(cluster["headGroupSpec"]) <= HEAD_FIELDS
    for group in cluster["workerGroupSpecs"]:
        assert set(group) <= WORKER_FIELDS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]


def test_kuberay_pods_have_what_they_mount(
    manifests: dict[tuple[str, str], dict[str, Any]], cluster: dict[str, Any]
) -> None:
    for pod in pods(cluster):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == set(volumes)
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in manifests
            if "secret" in volume:
                assert "token" in manifests["Secret", volume["secret"]["secretName"]]["stringData"]


def test_kuberay_server_is_where_probes_and_service_look(
    manifests: dict[tuple[str, str], dict[str, Any]], cluster: dict[str, Any]
) -> None:
    head = next(pods(cluster))
    # KubeRay takes the first container for Ray's.
    assert [container["name"] for container in head["containers"]] == ["ray-head", "pollux"]
    server = head["containers"][1]
    port = server["ports"][0]
    up = next(words for words in commands_in(server_script(cluster), "pollux") if words[0] == "up")
    assert option(up, "--port") == str(port["containerPort"])
    probes = {kind: server[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/healthz",
        "liveness": "/healthz",
        "readiness": "/readyz",
    }
    service = manifests["Service", "pollux"]["spec"]
    assert service["ports"][0]["targetPort"] == port["name"]
    assert service["selector"] == {"ray.io/cluster": "pollux", "ray.io/node-type": "head"}
    assert head["shareProcessNamespace"], "Ray is not joined from a container that does not see its processes"
    shared = [{(mount["name"], mount["mountPath"]) for mount in box["volumeMounts"]} for box in head["containers"]]
    assert ("ray-logs", "/tmp/ray") in shared[0] & shared[1]


def test_kuberay_nodes_fit_what_pollux_is_told(cluster: dict[str, Any]) -> None:
    (group,) = cluster["workerGroupSpecs"]
    up = next(words for words in commands_in(server_script(cluster), "pollux") if words[0] == "up")
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert option(up, "--node-slots") == str(limits["nvidia.com/gpu"])
    assert int(option(up, "--autoscale").split("..")[1]) == group["maxReplicas"]


def test_slurm_starts_ray_with_options_that_it_knows() -> None:
    from ray.scripts.scripts import start
    from ray.scripts.symmetric_run import symmetric_run

    (words,) = commands_in(SLURM.read_text(), "ray")  # and not "--engine ray --address"
    before = words[1 : words.index("--")]
    given = {word.partition("=")[0] for word in before if word.startswith("--")}
    own = opts_of(symmetric_run)
    assert words[0] == "symmetric-run"
    assert given & own == {"--address", "--min-nodes"}
    assert given - own <= opts_of(start) - {"--head", "--node-ip-address", "--port", "--block"}


def test_slurm_says_so_if_ray_does_not_start(tmp_path: Path) -> None:
    """``ray symmetric-run`` ends with 0 then."""
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "jobs.txt").write_text("-- true\n")
    slurm = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "17", "SLURM_NNODES": "1", "HEAD_ADDRESS": "10.0.0.1"}
    env = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", **slurm}
    done = subprocess.run(
        ["bash", SLURM, "jobs.txt"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "error: Ray did not start" in done.stderr


@pytest.mark.parametrize("path", [SLURM], ids=lambda path: path.name)
def test_scripts_parse(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True, timeout=20)


def test_commands_in_manifests_parse(cluster: dict[str, Any], launcher: dict[str, Any]) -> None:
    for text in (server_script(cluster), *launcher["head_start_ray_commands"], *launcher["worker_start_ray_commands"]):
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=20)


def test_launcher_head_may_start_workers_that_have_a_profile(launcher: dict[str, Any]) -> None:
    """Ray's default role of the head may not pass another role on: its policy is in the page."""
    head, worker = (launcher["available_node_types"][name]["node_config"] for name in ("head", "worker"))
    assert head["IamInstanceProfile"] != worker["IamInstanceProfile"]
    page = (ROOT / "docs" / "deploy-cloud.md").read_text()
    policy = json.loads(
        next(block for block in re.findall(r"```json\n(.*?)```", page, re.DOTALL) if "PassRole" in block)
    )
    actions = {action for one in policy["Statement"] for action in one["Action"]}
    assert {"iam:PassRole", "ec2:RunInstances", "ec2:TerminateInstances", "ec2:CreateTags"} <= actions
    passed = next(one for one in policy["Statement"] if "iam:PassRole" in one["Action"])
    assert "*" not in passed["Resource"]


def test_ray_asks_for_a_token_wherever_it_is_deployed(launcher: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert launcher_text(launcher).count("RAY_AUTH_MODE=token") == 3  # head, server, workers
    assert "/home/ray/.ray/auth_token" in launcher["file_mounts"]
    boxes = [box for pod in pods(cluster) for box in pod["containers"]]
    for env in (*(box["env"] for box in boxes), cluster["autoscalerOptions"]["env"]):
        rows = {row["name"]: row for row in env}
        assert rows["RAY_AUTH_MODE"]["value"] == "token"
        assert rows["RAY_AUTH_TOKEN"]["valueFrom"]["secretKeyRef"] == {"name": "pollux-ray-token", "key": "auth_token"}
    assert "RAY_AUTH_MODE=token" in SLURM.read_text()


def test_placeholders_of_secrets_are_refused(manifests: dict[tuple[str, str], dict[str, Any]], tmp_path: Path) -> None:
    from pollux.errors import InputFileError
    from pollux.server.http.auth import load_token

    path = tmp_path / "token"
    path.write_text(manifests["Secret", "pollux-token"]["stringData"]["token"])
    with pytest.raises(InputFileError, match="a placeholder"):
        load_token(path)


def test_kuberay_is_watched_tolerated_and_closed(
    manifests: dict[tuple[str, str], dict[str, Any]], cluster: dict[str, Any]
) -> None:
    _head, workers = pods(cluster)
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in workers["tolerations"]
    monitor = manifests["PodMonitor", "pollux"]["spec"]
    assert monitor["selector"]["matchLabels"] == {"ray.io/cluster": "pollux", "ray.io/node-type": "head"}
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("pollux", "/metrics")
    assert endpoint["authorization"]["credentials"] == {"name": "pollux-token", "key": "token"}
    closed = manifests["NetworkPolicy", "pollux-ray"]["spec"]
    assert closed["podSelector"] == {"matchLabels": {"ray.io/cluster": "pollux"}} and closed["policyTypes"] == [
        "Ingress"
    ]
    inside, outside = closed["ingress"]
    assert inside["from"][0] == {"podSelector": {"matchLabels": {"ray.io/cluster": "pollux"}}} and "ports" not in inside
    assert {row["port"] for row in outside["ports"]} == {7077}


def test_prometheus_looks_where_the_server_listens() -> None:
    """With Ray that is the address by which the nodes reach it, not the loopback."""
    scraped = yaml.safe_load((DEPLOY / "grafana" / "prometheus.yml").read_text())
    targets = [
        target for job in scraped["scrape_configs"] for row in job["static_configs"] for target in row["targets"]
    ]
    assert targets == ["SERVER:7077"]


def test_image_has_something_to_run() -> None:
    text = DOCKERFILE.read_text()
    command = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[-1])
    assert command[:2] == ["pollux", "up"]
    given = {word for word in command[2:] if word.startswith("--")}
    assert given <= opts_of(load_command("up"))
    assert "EXPOSE 7077" in text and "HEALTHCHECK" in text
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().split()
    for words in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        for path in words.split()[1:-1]:
            assert f"!{path}" in ignored, path


def test_slurm_takes_all_memory_and_counts_gpus_on_every_node(tmp_path: Path) -> None:
    """``srun`` here runs its command twice, as nodes with other numbers of GPUs."""
    text = SLURM.read_text()
    assert re.search(r"^#SBATCH --mem=0$", text, re.MULTILINE)
    starts = tmp_path / "srun"
    starts.write_text(
        "#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\n"
        'SLURM_GPUS_ON_NODE=4 SLURM_CPUS_ON_NODE=8 "$@"\nSLURM_GPUS_ON_NODE=2 SLURM_CPUS_ON_NODE=6 "$@"\n'
    )
    (tmp_path / "ray").write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/started\n')
    run_slurm(tmp_path, "-- true\n")
    started = (tmp_path / "started").read_text().splitlines()
    assert ["--num-gpus=4" in started[0], "--num-gpus=2" in started[1]] == [True, True], started
    assert ["--num-cpus=8" in started[0], "--num-cpus=6" in started[1]] == [True, True], started


def test_slurm_goes_on_after_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n')
    (tmp_path / "ray").write_text('#!/bin/bash\nwhile [[ $1 != -- ]]; do shift; done\nshift\nexec "$@"\n')
    (tmp_path / "pollux").write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\n'
        'if [[ $1 == submit ]]; then [[ $* == *--bad* ]] && exit 2; echo "${@: -1}"; fi\n'
    )
    done = run_slurm(tmp_path, "-- first\n--bad -- second\n-- 'unclosed\n-- third\n")
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "submit -- third" in calls and "wait first third" in calls, calls
    assert done.returncode == 1
    assert "line 2 of jobs.txt" in done.stderr and "line 3 of jobs.txt" in done.stderr


def run_slurm(folder: Path, jobs: str) -> subprocess.CompletedProcess[str]:
    (folder / "jobs.txt").write_text(jobs)
    for path in folder.iterdir():
        path.chmod(0o755)
    slurm = {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": "17", "SLURM_NNODES": "1", "HEAD_ADDRESS": "10.0.0.1"}
    env = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **slurm}
    return subprocess.run(
        ["bash", SLURM, "jobs.txt"], cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


# --- all of them -----------------------------------------------------------------------------------------------------


def test_lost_nodes_are_looked_for_alike(launcher: dict[str, Any], cluster: dict[str, Any]) -> None:
    """As where Pollux itself starts the head."""
    expected = {f"RAY_{name}": str(value) for name, value in HEALTH_CHECKS.items()}
    config = re.search(r"--system-config='(.*?)'", launcher_text(launcher))
    assert config is not None
    assert json.loads(config[1]) == HEALTH_CHECKS
    for pod in pods(cluster):
        env = {row["name"]: row.get("value") for row in pod["containers"][0]["env"]}
        assert expected.items() <= env.items()
    assert expected.items() <= dict(re.findall(r"(RAY_\w+)=(\w+)", SLURM.read_text())).items()


def test_versions_are_those_that_are_tested(cluster: dict[str, Any]) -> None:
    pinned = re.search(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned[1]
    assert f"FROM rayproject/ray:{pinned[1]}-" in DOCKERFILE.read_text()


def test_image_is_built_from_what_is_there() -> None:
    copied = [words.split()[1:] for words in re.findall(r"^COPY (.*)$", DOCKERFILE.read_text(), re.MULTILINE)]
    for path in (path for words in copied for path in words[:-1]):
        assert (ROOT / path).exists()


def test_commands_and_options_exist(launcher: dict[str, Any], cluster: dict[str, Any]) -> None:
    known = typer.main.get_command(app).commands
    pages = "\n".join(page.read_text() for page in PAGES)
    found = [
        words
        for text in (launcher_text(launcher), server_script(cluster), SLURM.read_text(), pages)
        for words in commands_in(text, "pollux")
    ]
    assert {"up", "down", "submit", "wait", "status"} <= {words[0] for words in found}
    for words in found:
        given = {word.partition("=")[0] for word in words[1:] if word.startswith("--") and word != "--"}
        if "--" in words:
            given = {word.partition("=")[0] for word in words[1 : words.index("--")] if word.startswith("--")}
        assert words[0] in known, words
        assert given <= opts_of(load_command(words[0])), words


def test_ray_is_started_with_options_that_it_knows(launcher: dict[str, Any], cluster: dict[str, Any]) -> None:
    from ray.scripts.scripts import start

    started = [words for words in commands_in(launcher_text(launcher), "ray") if words[0] == "start"]
    assert len(started) == 2
    for words in started:
        assert {word.partition("=")[0] for word in words[1:] if word.startswith("--")} <= opts_of(start), words
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert {f"--{name}" for name in group["rayStartParams"]} <= opts_of(start)


def opts_of(command: Any) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_the_systemd_unit_is_a_good_one(tmp_path: Path) -> None:
    """As systemd reads it; but for the program, which is not installed here."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    text = (ROOT / "deploy/systemd/pollux.service").read_text()
    unit = tmp_path / "pollux.service"
    unit.write_text(text.replace("/opt/pollux/bin/pollux", shutil.which("true") or "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "pollux.service" not in done.stderr, done.stderr
