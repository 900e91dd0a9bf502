"""OpenAPI for bodies that the routes decode themselves, made from the messages' own classes."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter

from pollux.api.errors import ErrorAnswer
from pollux.api.request import FORMAT_VERSION, OPTIONS, JobRequest

Schema = dict[str, Any]  # JSON
Responses = dict[int | str, Schema]  # as FastAPI wants them
JOB_EXAMPLE = {"command": ["python", "train.py"], "cwd": "/home/me/project", "name": "mnist", "max_replicas": 4}
_JOB_HELP = {
    **{option.field: option.help for option in OPTIONS},
    "command": "Program and arguments; they never go through a shell.",
    "array_index": "Set by the server for the jobs of an array.",
    "array_of": "Set by the server: the array's name.",
    "array_limit": "Set by the server: how many jobs of the array run at a time.",
    "params": "For run.param in the script, by name: numbers, texts, true or false.",
    "study": "Set by the server for the trials of a study.",
    "metric": "Set by the server for the trials of a study: what the study reads.",
    "workdir": "The id of a working directory that was sent before.",
    "versions": "Of what runs, by name: git, workdir, python, torch, pollux.",
}


def error_answers(*statuses: int) -> Responses:
    return {
        status: {"model": ErrorAnswer, "description": HTTPStatus(status).phrase}
        for status in (401, 403, *statuses, 503)
    }


def body_schema(kind: type, *, is_required: bool, example: object = None) -> Schema:
    """The ``requestBody`` of OpenAPI."""
    schema = TypeAdapter(kind).json_schema()
    _close(schema)
    if (version := getattr(kind, "VERSION", None)) is not None:
        schema["properties"]["version"] = {"const": version, "description": "Of this form."}
        schema["required"] = [*schema.get("required", ()), "version"]
    content: Schema = {"schema": schema}
    if example is not None:
        content["example"] = example
    return {"requestBody": {"required": is_required, "content": {"application/json": content}}}


def job_body() -> Schema:
    """The body of a submission: a :class:`~pollux.api.request.JobRequest`."""
    made = body_schema(JobRequest, is_required=True, example=JOB_EXAMPLE)
    properties = made["requestBody"]["content"]["application/json"]["schema"]["properties"]
    for name, text in _JOB_HELP.items():
        properties[name]["description"] = text
    for name in ("deadline_s", "budget_hours"):
        for one in properties[name].get("anyOf", [properties[name]]):
            if one.get("type") == "number":
                one["exclusiveMinimum"] = 0
    properties["version"] = {"const": FORMAT_VERSION, "default": FORMAT_VERSION, "description": "Of this form."}
    return made


def describe(app: FastAPI) -> Schema:
    """The application's OpenAPI description."""
    if app.openapi_schema is None:
        made = FastAPI.openapi(app)
        for schema in _objects(made):
            _widen(schema)
        app.openapi_schema = made
    return app.openapi_schema


def _close(schema: Schema) -> None:
    """No field but the known ones is allowed, here and within."""
    for inside in _objects(schema):
        _widen(inside)
        if "properties" in inside:
            inside["additionalProperties"] = False


def _widen(schema: Schema) -> None:
    """A list whose entries have a type each is described as a list of any of these: tools do not know more."""
    if isinstance(types := schema.pop("prefixItems", None), list):
        schema["items"] = {"anyOf": types}


def _objects(schema: object) -> Iterator[Schema]:
    """A schema and all that is within it."""
    if isinstance(schema, dict):
        yield schema
    for inside in list(schema.values()) if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _objects(inside)
