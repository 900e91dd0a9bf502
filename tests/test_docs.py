"""The pages in docs/ are run as they stand.

On a page with console blocks the blocks belong together: one user types them one after another. On the others each
``python`` block stands for itself.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pollux.api.request import OPTIONS
from tests.long import long
from tests.pages import ROOT, Block, read_blocks, require_extras, session

if TYPE_CHECKING:
    from tests.postgres import PostgresServer

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("tutorials/*.md"))]
SESSIONS = [page for page in PAGES if read_blocks(page, "console")]
EVERY_TIME = {"http"}  # the README's blocks are run as well; other pages are long
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{index}", marks=() if index == 0 and page.stem == "training" else long)
    for page in PAGES
    if page not in SESSIONS
    for index, block in enumerate(read_blocks(page, "python"))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: Block, tmp_path: Path) -> None:
    with session(tmp_path) as user:
        assert user.run(block)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(
            page, id=str(page.relative_to(DOCS).with_suffix("")), marks=() if page.stem in EVERY_TIME else long
        )
        for page in SESSIONS
    ],
)
def test_pages_run_from_top_to_bottom(
    page: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = read_blocks(page, "console", "python")
    if any("$DATABASE" in block.text for block in blocks):
        server: PostgresServer = request.getfixturevalue("postgres")
        monkeypatch.setenv("DATABASE", server.url(server.new_database()))
    if any("curl " in block.text for block in blocks) and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    require_extras(blocks)
    with session(tmp_path) as user:
        for block in blocks:
            printed = user.run(block)
            assert printed or block.file or block.language == "console"
    for name in re.findall(r"^\$ .*--(?:html|output) (\S+)", "\n".join(block.text for block in blocks), re.MULTILINE):
        assert (tmp_path / name).stat().st_size > 500, name


def test_every_job_option_is_explained() -> None:
    explained = set(re.findall(r"^\| `--([\w-]+)", (DOCS / "cluster.md").read_text(), re.MULTILINE))
    assert {option.name for option in OPTIONS} <= explained
