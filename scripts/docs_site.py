"""Pages that the documentation's site has besides docs/: the README as its first page, and references made from code.

mkdocs calls the functions of this file (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

import click
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
# Pages of the repository's root, and their place on the site.
OUTSIDE = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "report-a-weakness.md",
    "CHANGELOG.md": "changes.md",
}
# What scripts use, in the order in which they meet it.
REFERENCE = {
    "train": (
        "pollux.train.run.init",
        "pollux.train.run.Run",
        "pollux.train.loader.AdaptiveLoader",
        "pollux.train.batching",
        "pollux.train.scaling",
        "pollux.train.noise.NoiseScale",
        "pollux.train.checkpoint.CheckpointDirectory",
    ),
    "client": ("pollux.client.client.Client", "pollux.client.client.Job", "pollux.client.client.JobResult"),
    "elastic": ("pollux.elastic.job.join", "pollux.elastic.job.Job", "pollux.elastic.batch"),
}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s#]+)(#[^)]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not files of docs/."""
    for source, target in OUTSIDE.items():
        files.append(File.generated(config, target, content=(ROOT / source).read_text()))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    for name, items in REFERENCE.items():
        content = "\n\n".join((f"# pollux.{name}", *(f"::: {item}" for item in items)))
        files.append(File.generated(config, f"reference/{name}.md", content=f"{content}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to the repository's files lead to the site's pages, or become the file's name."""
    here = {target: source for source, target in OUTSIDE.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def lead(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), target))
        if path in OUTSIDE:
            found = OUTSIDE[path]
        elif path.startswith("docs/") and (ROOT / path).is_file():
            found = path.removeprefix("docs/")
        elif page.file.src_uri.startswith("reference/"):
            return match[0]
        else:
            return f"{text} (`{path}`)" if text.strip("`") != path else f"`{path}`"
        link = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
        return f"{mark}[{text}]({link}{anchor or ''})"

    return _LINK.sub(lead, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Docstrings name functions as Sphinx does (``:func:`x```); the site shows the name. An empty head is no head."""
    html = re.sub(r"<th([^>]*)></th>", r"<td\1></td>", html)
    return re.sub(r":(?:func|class|meth|mod|attr|data):(?=<code>)", "", html)


def commands_page() -> str:
    """Every command with its options, from the command line's own definition."""
    os.environ["COLUMNS"] = "120"
    from pollux.cli.app import PANELS, load_command

    parts = ["# Commands", "", "Made from the commands' own definitions; `pollux COMMAND --help` prints the same."]
    for panel, commands in PANELS.items():
        parts += ["", f"## {panel}"]
        for name in commands:
            parts += _command(load_command(name), f"pollux {name}")
    return "\n".join(parts) + "\n"


def _command(command: click.Command, name: str) -> list[str]:
    context = click.Context(command, info_name=name)
    help_text = (command.help or "").replace("\b", "").strip()
    lines = ["", f"### {name}", "", help_text]
    if isinstance(command, click.Group):
        for below in command.list_commands(context):
            found = command.get_command(context, below)
            assert found is not None
            lines += _command(found, f"{name} {below}")
        return lines
    rows = []
    for parameter in command.params:
        if getattr(parameter, "hidden", False) or parameter.name == "help":
            continue
        shown = ", ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))
        if isinstance(parameter, click.Argument):
            shown = f"`{parameter.make_metavar(context)}`"
        text = getattr(parameter, "help", None) or ""
        rows.append(f"| {shown} | {' '.join(text.split()).replace('|', chr(92) + '|')} |")
    return [*lines, "", "| option | |", "|---|---|", *rows] if rows else lines


__all__ = ["commands_page", "on_files", "on_page_content", "on_page_markdown"]
