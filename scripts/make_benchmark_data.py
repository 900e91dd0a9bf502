"""Make the data file of ``benchmarks/time_to_quality.py`` from what a Debian machine has: fonts, source code, manuals.

    pip install --target out/pillow Pillow
    PYTHONPATH=out/pillow python scripts/make_benchmark_data.py [--out out/benchmark_data.npz]

Needs Pillow, some hundred fonts under /usr/share/fonts (``apt-get install fonts-...``), and for the other texts
``apt-get install perl-doc``. The same files give the same output. Validation data are whole files and whole font
families that training never sees. Large arrays are stored as xz, which is smaller than what .npz does by itself;
``benchmarks/quality_tasks.py`` reads them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import re
import string
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHARACTERS = string.digits + string.ascii_letters + string.punctuation  # 94 classes
SIZE, LEVELS = 32, 16  # pixels per side; shades of grey that are kept
ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "lib2to3", "unicore"}
NAME = re.compile(rb"(?<=\.)[A-Za-z]\w+|\b[A-Za-z]\w+(?=\()")  # follows a dot, or is called
WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?|[0-9]|[^\sA-Za-z0-9]|\n\n+")

Arrays = dict[str, NDArray[Any]]


# Packing --------------------------------------------------------------------------------------


def pack(arrays: Arrays) -> Arrays:
    """Each array as xz bytes, and one entry that says their types and shapes."""
    shapes = {name: [str(array.dtype), list(array.shape)] for name, array in arrays.items()}
    packed = {
        name: np.frombuffer(lzma.compress(np.ascontiguousarray(array).tobytes(), preset=9), np.uint8)
        for name, array in arrays.items()
    }
    return {"shapes": np.frombuffer(json.dumps(shapes).encode(), np.uint8), **packed}


def draw(text: str) -> int:
    """A number that depends on the text alone; Python's own hash differs from process to process."""
    return int.from_bytes(hashlib.sha1(text.encode()).digest()[:8], "big")


# Texts ----------------------------------------------------------------------------------------


def find_files(roots: Iterable[Path], suffixes: set[str]) -> list[tuple[str, bytes]]:
    """(path below its root, content) of every source file, in an order of no meaning, each content once."""
    found: dict[bytes, tuple[str, bytes]] = {}
    for root in roots:
        for path in sorted(root.rglob("*")):
            inside = path.relative_to(root)
            if path.suffix in suffixes and not LEFT_OUT & set(inside.parts) and path.is_file():
                content = path.read_bytes()
                if len(content) >= 500:
                    found.setdefault(hashlib.sha1(content).digest(), (str(inside), content))
    return sorted(found.values(), key=lambda item: draw(item[0]))


def split_text(files: list[tuple[str, bytes]], max_bytes: int, prefix: str) -> Arrays:
    """ASCII codes of the joined files: the first twentieth validates, the rest trains. No line is longer than 300."""
    lines = (b"\n".join(line[:300] for line in content.splitlines()) + b"\n" for _, content in files)
    text = np.frombuffer(b"".join(lines)[:max_bytes], np.uint8).clip(max=127)
    split = len(text) // 20
    return {f"{prefix}_val": text[:split], f"{prefix}_train": text[split:]}


def word_arrays(files: list[tuple[str, bytes]], vocabulary: int) -> Arrays:
    """Numbers of words, the commonest first; 0 stands for all rarer ones."""
    words = WORD.findall("\n\n".join(content.decode("utf-8", "replace") for _, content in files))
    words = ["\n" if word.isspace() else word.lower() for word in words]
    common = [word for word, _ in Counter(words).most_common(vocabulary - 1)]
    number = {word: index + 1 for index, word in enumerate(common)}
    ids = np.array([number.get(word, 0) for word in words], np.uint16)
    split = len(ids) // 20
    return {"words_val": ids[:split], "words_train": ids[split:]}


def interaction_arrays(files: list[tuple[str, bytes]], max_modules: int, max_names: int) -> Arrays:
    """Pairs (module, name that it uses). Of every module's names one in ten validates.

    Names count where at least 8 modules use them, modules where they use at least 15 such names.
    """
    used = [set(NAME.findall(content)) for _, content in files]
    counts = Counter(name for names in used for name in names)
    kept = sorted((name for name, count in counts.items() if count >= 8), key=lambda name: (-counts[name], name))
    number = {name: index for index, name in enumerate(kept[:max_names])}
    rows = [sorted(number[name] for name in names if name in number) for names in used]
    rows = [row for row in rows if len(row) >= 15][:max_modules]
    modules = np.concatenate([np.full(len(row), index, np.uint16) for index, row in enumerate(rows)])
    names = np.concatenate([np.array(row, np.uint16) for row in rows])
    is_val = np.random.default_rng(0).random(len(names)) < 0.1
    return {
        "modules_train": modules[~is_val], "names_train": names[~is_val],
        "modules_val": modules[is_val], "names_val": names[is_val],
    }  # fmt: skip


# Glyphs ---------------------------------------------------------------------------------------


def render(path: Path) -> tuple[str, NDArray[np.uint8]] | None:
    """(family, one image per character), or None where the font lacks some of them.

    All characters of a font share size and base line, so that "o" and "O" remain different.
    """
    from PIL import Image, ImageDraw, ImageFont

    try:
        font = ImageFont.truetype(str(path), 24)
        family = font.getname()[0] or path.stem
        missing = bytes(font.getmask("\uffff"))
        images = []
        for character in CHARACTERS:
            if not (mask := bytes(font.getmask(character))) or not any(mask) or mask == missing:
                return None
            image = Image.new("L", (SIZE, SIZE))
            left, _, right, _ = font.getbbox(character, anchor="ls")
            ImageDraw.Draw(image).text((SIZE / 2 - (left + right) / 2, 23), character, 255, font, anchor="ls")
            images.append(np.asarray(image))
    except (OSError, ValueError):
        return None
    letters = [images[CHARACTERS.index(letter)] for letter in string.ascii_letters]
    if sum(np.array_equal(low, high) for low, high in zip(letters[:26], letters[26:], strict=True)) > 2:
        return None  # it has capitals only
    return family, np.stack(images)


def choose_fonts(roots: list[Path], per_family: int) -> tuple[list[str], NDArray[np.uint8]]:
    """(families, images of shape (fonts, characters, SIZE, SIZE)) without near copies and fonts of pictures."""
    families: list[str] = []
    images: list[NDArray[np.uint8]] = []
    paths = sorted(path for root in roots for path in root.rglob("*") if path.suffix.lower() in {".ttf", ".otf"})
    for path in sorted(paths, key=lambda path: draw(path.name)):
        made = render(path)
        if made is not None and families.count(made[0]) < per_family:
            families.append(made[0])
            images.append(made[1])
    small = np.stack(images).reshape(len(images), len(CHARACTERS), 8, 4, 8, 4).mean((3, 5), dtype=np.float32)
    flat = small.reshape(len(images), -1) - small.mean()
    flat /= np.linalg.norm(flat, axis=1, keepdims=True)
    usual = flat @ flat.mean(0)
    alike = np.triu(flat @ flat.T, 1).max(0)  # to any font before it
    kept = np.flatnonzero((usual > np.quantile(usual, 0.06)) & (alike < 0.985))
    return [families[index] for index in kept], np.stack([images[index] for index in kept])


def glyph_arrays(roots: list[Path], max_fonts: int) -> Arrays:
    """Images and labels; one family in seven validates, and of a family everything is on one side."""
    families, images = choose_fonts(roots, per_family=2)
    families, images = families[:max_fonts], images[:max_fonts]
    is_val = np.array([draw(f"family {family}") % 7 == 0 for family in families])
    images = images // (256 // LEVELS)
    labels = np.broadcast_to(np.arange(len(CHARACTERS), dtype=np.uint8), images.shape[:2])
    print(f"glyphs: {(~is_val).sum()} fonts to train, {is_val.sum()} to validate, {len(set(families))} families")
    return {
        "images_train": images[~is_val].reshape(-1, SIZE, SIZE), "labels_train": labels[~is_val].ravel(),
        "images_val": images[is_val].reshape(-1, SIZE, SIZE), "labels_val": labels[is_val].ravel(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "benchmark_data.npz")
    parser.add_argument("--fonts", type=int, default=720, help="at most so many (default 720)")
    parser.add_argument("--large-mb", type=float, default=18.0, help="size of the larger text (default 18 MB)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    library = find_files([Path(sysconfig.get_path("stdlib"))], {".py"})
    debian = find_files([Path("/usr/lib/python3/dist-packages"), Path("/usr/share/perl")], {".py", ".pm", ".pl"})
    installed = find_files([Path(sysconfig.get_path("purelib"))], {".py"})
    manuals = find_files([Path("/usr/share/perl")], {".pod"})
    arrays = {
        **split_text(library, 12_000_000, "stdlib"),
        **split_text(debian, int(options.large_mb * 1e6), "code"),
        **word_arrays(manuals, 10_000),
        **interaction_arrays(installed, 12_000, 16_000),
        **glyph_arrays([Path("/usr/share/fonts"), Path("/usr/share/texmf/fonts")], options.fonts),
    }
    packed = pack(arrays)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(options.out, **packed)
    for name, array in arrays.items():
        print(f"{name:15} {array.dtype!s:7} {array.shape!s:18} {packed[name].size / 1e6:6.2f} MB packed")
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
