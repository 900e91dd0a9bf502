"""Reads CSV input, with errors that name file, row and what is allowed. Workloads, traces and speeds use it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pollux.errors import InputFileError

_T = TypeVar("_T")


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """(row number, row) of a CSV file that must have ``columns``; row 1 is the header.

    Raises:
        InputFileError: it is missing, empty, not text, or lacks a column or a value.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            header = reader.fieldnames
            if not header:
                raise InputFileError(path, f"empty file; a header with {', '.join(columns)} is needed")
            missing = [column for column in columns if column not in header]
            if missing:
                raise InputFileError(path, f"missing column {', '.join(missing)}; seen: {', '.join(header)}", 1)
            num_rows = 0
            for number, row in enumerate(reader, start=2):
                lacking = [column for column in columns if row[column] is None or not str(row[column]).strip()]
                if lacking:
                    raise InputFileError(path, f"no value for {', '.join(lacking)}", number)
                num_rows += 1
                yield number, {key: str(value).strip() for key, value in row.items() if key is not None}
            if num_rows == 0:
                raise InputFileError(path, "no rows below the header")
    except FileNotFoundError as error:
        raise InputFileError(path, "no such file") from error
    except IsADirectoryError as error:
        raise InputFileError(path, "a directory, not a file") from error
    except OSError as error:
        raise InputFileError(path, f"cannot be read ({error.strerror})") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputFileError(path, f"not a CSV text file ({error})") from error


def _convert(path: Path, number: int, row: dict[str, str], column: str, kind: Callable[[str], _T], what: str) -> _T:
    try:
        return kind(row[column])
    except (ValueError, OverflowError) as error:
        raise InputFileError(path, f"{column} = {row[column]!r} is not {what}", number) from error


def to_float(path: Path, number: int, row: dict[str, str], column: str) -> float:
    value = _convert(path, number, row, column, float, "a number")
    if not math.isfinite(value):
        raise InputFileError(path, f"{column} = {row[column]!r} is not a finite number", number)
    return value


def to_int(path: Path, number: int, row: dict[str, str], column: str) -> int:
    value = to_float(path, number, row, column)
    if value != int(value):
        raise InputFileError(path, f"{column} = {row[column]!r} is not a whole number", number)
    return int(value)
