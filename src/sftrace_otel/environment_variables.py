# SPDX-License-Identifier: Apache-2.0
"""The variables of this package, as `opentelemetry-instrument` wants them: it makes a flag of each `OTEL_` name.

Importing this module may also set `OTEL_PYTHON_DISTRO=sftrace`. `opentelemetry-instrument` imports it before it starts
the program, and otherwise takes the first distro that it finds, in the order of a directory listing. With
`opentelemetry-distro` found first, and no OTLP exporter installed, its default of three OTLP exporters makes the whole
start fail. So the variable is set, and only if nothing shows that somebody chose: no `OTEL_PYTHON_DISTRO`,
`OTEL_CONFIG_FILE`, `OTEL_TRACES_EXPORTER`, `OTEL_METRICS_EXPORTER` or `OTEL_LOGS_EXPORTER`, and recording is not off.
Our distro runs the other distro that it finds, so that one's settings hold. Rejected: leaving it to chance.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping
from pathlib import PurePath

OTEL_SFTRACE_DIR = "OTEL_SFTRACE_DIR"
"""Folder for bundles. Default: `sftraces`."""

OTEL_SFTRACE_AGENT = "OTEL_SFTRACE_AGENT"
"""Name of the agent. Default: `service.name`, else the name of the script."""

OTEL_SFTRACE_FORMATS = "OTEL_SFTRACE_FORMATS"
"""`sftrace` (default), `flight`, or both with a comma."""

OTEL_SFTRACE_SCOPE = "OTEL_SFTRACE_SCOPE"
"""What makes a run: `auto` (default), `process` or `trace`."""

OTEL_SFTRACE_CAPTURE = "OTEL_SFTRACE_CAPTURE"
"""`full` (default), `metadata` (no payloads) or `off`."""

OTEL_SFTRACE_CONTENT = "OTEL_SFTRACE_CONTENT"
"""`reference` (default) keeps payloads off spans; `span` also puts the redacted payload there."""

OTEL_SFTRACE_KEEP = "OTEL_SFTRACE_KEEP"
"""Which ended runs stay on disk: `all` (default), `failed` or `flagged`."""

OTEL_SFTRACE_MAX_DISK_MB = "OTEL_SFTRACE_MAX_DISK_MB"
"""Room for bundles in the folder, in MiB; completed ones go first. Default: 1024."""

OTEL_SFTRACE_MAX_RUN_MB = "OTEL_SFTRACE_MAX_RUN_MB"
"""A run of this size in MiB closes and another one goes on. Default: 256."""

OTEL_SFTRACE_ON_CLOSE = "OTEL_SFTRACE_ON_CLOSE"
"""`module:callable`, called with the path of each bundle."""

OTEL_SFTRACE_FSYNC = "OTEL_SFTRACE_FSYNC"
"""`close` (default), `never` or `event`."""

OTEL_SFTRACE_MAX_PAYLOAD_BYTES = "OTEL_SFTRACE_MAX_PAYLOAD_BYTES"
"""Longer payloads are cut and marked. Default: 16777216."""

OTEL_SFTRACE_REDACTION = "OTEL_SFTRACE_REDACTION"
"""A TOML file with redaction rules of one's own."""

OTEL_SFTRACE_TOOLS = "OTEL_SFTRACE_TOOLS"
"""Functions to record as tools: `module:callable,…`, with wildcards."""

OTEL_SFTRACE_QUIET = "OTEL_SFTRACE_QUIET"
"""`true`: no lines on stderr."""

OTEL_SFTRACE_REPLAY = "OTEL_SFTRACE_REPLAY"
"""A bundle to answer from instead of recording."""

OTEL_SFTRACE_REPLAY_MODE = "OTEL_SFTRACE_REPLAY_MODE"
"""`frozen` (default), `hybrid`, `live` or `resume`."""

OTEL_SFTRACE_REPLAY_LIVE_LLMS = "OTEL_SFTRACE_REPLAY_LIVE_LLMS"
"""`provider/model,…` that hybrid mode lets out."""

OTEL_SFTRACE_REPLAY_LIVE_TOOLS = "OTEL_SFTRACE_REPLAY_LIVE_TOOLS"
"""Names of tools, with commas, that live mode lets out."""

OTEL_SFTRACE_REPLAY_POLICIES = "OTEL_SFTRACE_REPLAY_POLICIES"
"""`KIND:NAME=POLICY,…`, or a JSON array of them: what resume mode does past the end of the recording."""

OTEL_SFTRACE_REPLAY_REUSE = "OTEL_SFTRACE_REPLAY_REUSE"
"""`true`, or the parent bundle whose calls resume mode reuses where their input is unchanged."""

OTEL_SFTRACE_REPLAY_ALLOW_REDACTED = "OTEL_SFTRACE_REPLAY_ALLOW_REDACTED"
"""`true`: in resume mode tools and HTTP exchanges go out with placeholders of redacted values in their input."""

OTEL_SFTRACE_REPLAY_IGNORE = "OTEL_SFTRACE_REPLAY_IGNORE"
"""JSON Pointers, with commas, into inputs: left out when calls are compared."""

OTEL_SFTRACE_REPLAY_NORMALIZE = "OTEL_SFTRACE_REPLAY_NORMALIZE"
"""`iso_time`, `uuid`, `path`, with commas: left out of every text when calls are compared."""

OTEL_SFTRACE_REPLAY_RECORD = "OTEL_SFTRACE_REPLAY_RECORD"
"""A bundle to record the replay into."""

OTEL_SFTRACE_REPLAY_FORCE = "OTEL_SFTRACE_REPLAY_FORCE"
"""`true`: replay also where `deployment.environment.name` is `production`."""

OTEL_SFTRACE_REPLAY_ORDER = "OTEL_SFTRACE_REPLAY_ORDER"
"""`causal` (default), `strict` or `any`."""

OTEL_SFTRACE_REPLAY_ALLOW = "OTEL_SFTRACE_REPLAY_ALLOW"
"""`host:port,…` that may be connected to under replay."""

OTEL_SFTRACE_REPLAY_REPORT = "OTEL_SFTRACE_REPLAY_REPORT"
"""A file for the replay's report."""

OTEL_SFTRACE_NONDETERMINISM = "OTEL_SFTRACE_NONDETERMINISM"
"""`off` (default), or `record`: what the program reads of the clock and draws at random, for replay to give back."""

OTEL_SFTRACE_PARENT = "OTEL_SFTRACE_PARENT"
"""Run id of the process that started this one; set by this package."""

OTEL_SFTRACE_PRICES = "OTEL_SFTRACE_PRICES"
"""A JSON file with prices of models in US dollars per million tokens; LLM calls then say what they cost."""

_CHOICES = (
    "OTEL_PYTHON_DISTRO",
    "OTEL_CONFIG_FILE",
    "OTEL_TRACES_EXPORTER",
    "OTEL_METRICS_EXPORTER",
    "OTEL_LOGS_EXPORTER",
)


def choose_distro(environ: MutableMapping[str, str]) -> bool:
    """Set `OTEL_PYTHON_DISTRO=sftrace` in `environ` if nothing there shows that somebody chose; True if it was set."""
    if any(environ.get(name, "").strip() for name in _CHOICES):
        return False
    if environ.get(OTEL_SFTRACE_CAPTURE, "").strip().lower() == "off":
        return False
    environ["OTEL_PYTHON_DISTRO"] = "sftrace"
    return True


# Only for the command that is about to start a program; a program that imports this module keeps its environment.
if PurePath(sys.argv[0] if sys.argv else "").name.startswith("opentelemetry-instrument"):
    choose_distro(os.environ)
