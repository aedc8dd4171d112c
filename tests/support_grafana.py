"""What a Grafana dashboard file must look like, and the queries in it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DASHBOARDS = Path(__file__).parents[1] / "ops" / "grafana" / "dashboards"

_TEXT = {"type": "string", "minLength": 1}
_SOURCE = {
    "type": "object",
    "properties": {"type": {"const": "prometheus"}, "uid": {"const": "${datasource}"}},
    "required": ["type", "uid"],
    "additionalProperties": False,
}
_PANEL: dict[str, Any] = {
    "type": "object",
    "required": ["id", "type", "title", "gridPos"],
    "properties": {
        "id": {"type": "integer", "minimum": 1},
        "type": {"enum": ["timeseries", "stat", "state-timeline", "table", "row"]},
        "title": _TEXT,
        "description": _TEXT,
        "datasource": _SOURCE,
        "gridPos": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 23},
                "y": {"type": "integer", "minimum": 0},
                "w": {"type": "integer", "minimum": 1, "maximum": 24},
                "h": {"type": "integer", "minimum": 1},
            },
            "required": ["x", "y", "w", "h"],
            "additionalProperties": False,
        },
        "targets": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "datasource": _SOURCE,
                    "expr": _TEXT,
                    "legendFormat": _TEXT,
                    "refId": {"type": "string", "pattern": "^[A-Z]$"},
                    "range": {"type": "boolean"},
                    "instant": {"type": "boolean"},
                    "format": {"enum": ["table", "time_series"]},
                },
                "required": ["datasource", "expr", "refId"],
                "additionalProperties": False,
            },
        },
        "fieldConfig": {
            "type": "object",
            "properties": {"defaults": {"type": "object"}, "overrides": {"type": "array"}},
            "required": ["defaults", "overrides"],
            "additionalProperties": False,
        },
        "options": {"type": "object"},
        "transformations": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {"enum": ["merge", "organize"]}, "options": {"type": "object"}},
                "required": ["id", "options"],
                "additionalProperties": False,
            },
        },
        "collapsed": {"const": False},
        "panels": {"type": "array", "maxItems": 0},
    },
    "additionalProperties": False,
    "if": {"properties": {"type": {"const": "row"}}},
    "else": {"required": ["targets", "description", "datasource", "fieldConfig", "options"]},
}
# The parts of Grafana's classic dashboard model (schema version 39) that are used here.
SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "properties": {
        "uid": {"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,40}$"},
        "title": _TEXT,
        "tags": {"type": "array", "items": _TEXT},
        "schemaVersion": {"type": "integer", "minimum": 36},
        "version": {"type": "integer", "minimum": 1},
        "editable": {"type": "boolean"},
        "graphTooltip": {"enum": [0, 1, 2]},
        "refresh": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "time": {"type": "object", "properties": {"from": _TEXT, "to": _TEXT}, "required": ["from", "to"]},
        "timezone": {"enum": ["browser", "utc"]},
        "annotations": {
            "type": "object",
            "properties": {"list": {"type": "array", "items": {"type": "object", "required": ["name", "datasource"]}}},
            "required": ["list"],
        },
        "templating": {
            "type": "object",
            "properties": {
                "list": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"name": _TEXT, "type": {"enum": ["query", "datasource"]}},
                        "required": ["name", "type", "query"],
                    },
                }
            },
            "required": ["list"],
        },
        "links": {"type": "array", "items": {"type": "object", "required": ["type", "title"]}},
        "panels": {"type": "array", "minItems": 1, "items": _PANEL},
    },
    "required": ["uid", "title", "schemaVersion", "time", "templating", "panels"],
    "additionalProperties": False,
}


def dashboards() -> dict[str, dict[str, Any]]:
    """Every shipped dashboard by its file's name."""
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def queries(dashboard: dict[str, Any], pool: str = ".+", cls: str = ".+") -> Iterator[tuple[str, str]]:
    """Each query with the title of its panel, with values in place of Grafana's variables."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], filled(target["expr"], pool, cls)
    for note in dashboard["annotations"]["list"]:
        yield note["name"], filled(note["expr"], pool, cls)


def filled(query: str, pool: str, cls: str) -> str:
    """``query`` as Grafana would send it."""
    query = query.replace("$__rate_interval", "1m").replace("$pool", pool).replace("$class", cls)
    assert not re.search(r"\$\w", query), query
    return query
