"""Writes requirements.lock: what a server needs, each package with the hashes of its files.

``python scripts/lock.py`` asks pip what it would install of ``constraints.txt`` for each version of Python, on Linux
x86-64. ``pip install --require-hashes -r requirements.lock`` then takes no other files, wherever they come from.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VERSIONS = ("3.11", "3.12", "3.13")
EXTRAS = ("cli", "server", "postgres", "oidc")  # torch is left out: which build of it is right depends on the machine
OWN = "pollux-scheduler"
TIMEOUT_S = 600
HEADER = """\
# What pollux-scheduler[server,postgres,oidc] needs on Linux x86-64, Python {versions}; made by scripts/lock.py.
# pip install --require-hashes -r requirements.lock && pip install --no-deps .
"""


def wanted() -> list[str]:
    """Direct requirements of the package and its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [one for name in EXTRAS for one in project["optional-dependencies"][name]]
    return [one for one in [*project["dependencies"], *extras] if not one.startswith(OWN)]


def resolved(version: str) -> dict[str, tuple[str, str]]:
    """Name -> version and hash of the file that pip would install for a version of Python."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        where = ["--target", folder, "--python-version", version, "--only-binary", ":all:"]
        what = ["--constraint", str(ROOT / "constraints.txt"), *wanted()]
        install = ["install", "--quiet", "--disable-pip-version-check", "--dry-run", "--ignore-installed"]
        command = [sys.executable, "-m", "pip", *install, "--report", str(report), *where, *what]
        subprocess.run(command, check=True, timeout=TIMEOUT_S)
        found = {}
        for entry in json.loads(report.read_text())["install"]:
            digest = entry["download_info"]["archive_info"]["hashes"]["sha256"]
            found[entry["metadata"]["name"].lower().replace("_", "-")] = entry["metadata"]["version"], digest
        return found


def main() -> None:
    packages: dict[tuple[str, str], set[str]] = {}
    for version in VERSIONS:
        for name, (release, digest) in resolved(version).items():
            packages.setdefault((name, release), set()).add(digest)
    names = [name for name, _ in packages]
    if len(names) != len(set(names)):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise SystemExit(f"different releases for different versions of Python: {twice}; pin them in constraints.txt")
    lines = [HEADER.format(versions=", ".join(VERSIONS))]
    for (name, release), digests in sorted(packages.items()):
        lines.append(
            " \\\n".join([f"{name}=={release}", *(f"    --hash=sha256:{one}" for one in sorted(digests))]) + "\n"
        )
    (ROOT / "requirements.lock").write_text("".join(lines))


if __name__ == "__main__":
    main()
