# SPDX-License-Identifier: Apache-2.0
"""What is installed, what `opentelemetry-instrument` would choose, what would be recorded and where.

Decision: metadata of distributions and the loader's own rules; no target library is imported (openai alone would cost
more than all the rest) and nothing is patched. The folder is tested by making a temporary file in it, since permission
bits lie on network file systems.
"""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from sftrace_otel.core.redact import RedactionPolicy
from sftrace_otel.environment_variables import choose_distro
from sftrace_otel.errors import SettingsError
from sftrace_otel.instrumentation import CLIENTS
from sftrace_otel.settings import PREFIX, Settings
from sftrace_otel.version import __version__

__all__ = ["Diagnosis", "EntryPoints", "Folder", "Framework", "Library", "Pattern", "Requirement", "diagnose"]

_GROUPS = {
    "opentelemetry_distro": "OTEL_PYTHON_DISTRO",
    "opentelemetry_configurator": "OTEL_PYTHON_CONFIGURATOR",
    "opentelemetry_id_generator": "OTEL_PYTHON_ID_GENERATOR",
    "opentelemetry_traces_exporter": "OTEL_TRACES_EXPORTER",
    "opentelemetry_instrumentor": "",
}
_BOUNDARIES = {
    "httpx": ("httpx >= 0.27, < 1", "HTTP exchanges, as sent and received"),
    "httpx2": ("httpx2 >= 2, < 3", "HTTP exchanges, as sent and received"),
    "aiohttp": ("aiohttp >= 3.11, < 4", "HTTP exchanges of its client, as sent and received"),
    "urllib3": ("urllib3 >= 1.26, < 3", "HTTP exchanges, those of requests too"),
    "openai": ("openai >= 1.40, < 4", "chat completions, responses and embeddings, with and without streaming"),
    "anthropic": ("anthropic >= 0.40, < 3", "messages, with and without streaming"),
    "mcp": ("mcp >= 1.10, < 3", "requests of client sessions: tools, resources, prompts"),
    "langchain_core": ("langchain-core >= 1.8, < 2", "calls of its tools, those of langgraph's agents too"),
    "pydantic_ai": ("pydantic-ai-slim >= 2.68, < 3", "calls of tools in its toolsets"),
}
_FRAMEWORKS = (
    "mcp", "openai-agents", "pydantic-ai", "pydantic-ai-slim", "langchain-core", "langgraph", "llama-index-core",
    "crewai", "smolagents", "google-adk", "autogen-core", "haystack-ai", "strands-agents", "dspy",
)  # fmt: skip
_LOOKED_AT = 20
"""Bundles whose verdicts are read, the newest first."""
_OUTSIDE = {
    "pycurl": "its connections",
    "niquests": "its connections",
    "grpcio": "its calls",
    "boto3": "its connections (Bedrock too)",
    "websockets": "its messages (realtime APIs); a run that opened one says so",
}
_ALWAYS_OUTSIDE = (
    "tools that are of no framework above, carry no @trace_tool and are not named in OTEL_SFTRACE_TOOLS",
    "websockets, raw sockets, and HTTP clients other than httpx, httpx2, aiohttp and urllib3 (requests)",
    "programs that the agent starts and that are not Python",
    "the clock, random numbers, and files",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A distribution this package needs: what is asked for, what is installed (None: not), and whether it fits."""

    name: str
    needs: str
    version: str | None
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryPoints:
    """Who is registered in a group of OpenTelemetry, and who is chosen: `why` names the variable or rule."""

    group: str
    chosen: tuple[str, ...]
    why: str
    registered: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """A library with a boundary of ours: `state` is patched (in this process), patchable, unsupported or absent."""

    name: str
    version: str | None
    supported: str
    captures: str
    state: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Framework:
    """An agent framework that is installed, and how its tools get recorded."""

    name: str
    version: str
    tools: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A pattern of OTEL_SFTRACE_TOOLS: what it names by the text of the source files, and why it may name nothing."""

    text: str
    found: tuple[str, ...]
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """Where bundles go; `problem` is None where that folder can be written to (or made)."""

    path: str
    exists: bool
    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """All of it; `problems` is empty where a run started now would be recorded. `recorded`: what kept the newest
    bundles of the folder from replaying, each once: tools without an event, connections that were not followed."""

    version: str
    python: str
    platform: str
    requirements: tuple[Requirement, ...]
    entry_points: tuple[EntryPoints, ...]
    libraries: tuple[Library, ...]
    frameworks: tuple[Framework, ...]
    tools: tuple[Pattern, ...]
    recorded: tuple[str, ...]
    folder: Folder
    settings: Mapping[str, str]
    not_captured: tuple[str, ...]
    problems: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, object]:
        """JSON values of everything."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}


def diagnose(environ: Mapping[str, str], *, directory: str | None = None) -> Diagnosis:
    """Look at this interpreter and `environ`; `directory` overrides the folder for bundles."""
    try:
        settings, fault = Settings.from_environ(environ, dir=directory), None
    except SettingsError as error:
        settings, fault = Settings(), str(error)
    requirements = _requirements()
    libraries = tuple(_library(name) for name in _BOUNDARIES)
    folder = _folder(settings.dir)
    return Diagnosis(
        version=__version__,
        python=platform.python_version(),
        platform=platform.platform(terse=True),
        requirements=requirements,
        entry_points=tuple(_entry_points(group, name, environ) for group, name in _GROUPS.items()),
        libraries=libraries,
        frameworks=tuple(_frameworks()),
        tools=tuple(_patterns(settings.tools)),
        recorded=tuple(_recorded(settings.dir)),
        folder=folder,
        settings=_shown(environ),
        not_captured=(*_outside(), *_unfollowed(), *_ALWAYS_OUTSIDE),
        problems=tuple(_problems(environ, settings, fault, requirements, libraries, folder)),
    )


def _shown(environ: Mapping[str, str]) -> dict[str, str]:
    """Our variables; a secret that strayed into one is not shown."""
    policy = RedactionPolicy.default(environ)
    return {name: policy.redact_text(environ[name])[0] for name in sorted(environ) if name.startswith(PREFIX)}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fits(requirement: str) -> bool:
    from opentelemetry.instrumentation.dependencies import get_dependency_conflicts

    return get_dependency_conflicts([requirement]) is None


def _requirements() -> tuple[Requirement, ...]:
    try:
        lines = metadata.requires("sftrace-otel") or []
    except metadata.PackageNotFoundError:
        lines = []
    return tuple(_requirement(line) for line in lines if ";" not in line)


def _requirement(line: str) -> Requirement:
    name = line
    for mark in "<>=!~[ (":
        name = name.split(mark, 1)[0]
    return Requirement(name=name, needs=line[len(name) :].strip(" ()"), version=_version(name), fits=_fits(line))


def _entry_points(group: str, variable: str, environ: Mapping[str, str]) -> EntryPoints:
    """As the loader of opentelemetry-instrumentation chooses, and `environment_variables` makes it choose a distro."""
    registered = tuple(one.name for one in metadata.entry_points(group=group))
    asked = tuple(part.strip() for part in environ.get(variable, "").split(",") if part.strip()) if variable else ()
    if group == "opentelemetry_distro" and choose_distro(dict(environ)):
        return EntryPoints(group=group, chosen=("sftrace",), why="nothing else was chosen", registered=registered)
    if asked:
        return EntryPoints(group=group, chosen=asked, why=variable, registered=registered)
    if group == "opentelemetry_instrumentor":
        return EntryPoints(group=group, chosen=registered, why="all are loaded", registered=registered)
    if group in ("opentelemetry_traces_exporter", "opentelemetry_id_generator"):
        return EntryPoints(group=group, chosen=(), why="the distro decides", registered=registered)
    return EntryPoints(group=group, chosen=registered[:1], why="first found", registered=registered)


def _library(name: str) -> Library:
    supported, captures = _BOUNDARIES[name]
    version = _version(supported.partition(" ")[0])
    return Library(
        name=name, version=version, supported=supported, captures=captures, state=_state(name, version, supported)
    )


def _state(name: str, version: str | None, supported: str) -> str:
    if version is None:
        return "absent"
    if not _fits(supported):
        return "unsupported"
    return "patched" if any(place.partition(".")[0] == name for place in _patched()) else "patchable"


def _patched() -> Iterable[str]:
    """What is wrapped in this process; a boundary that was never loaded has wrapped nothing."""
    for name in CLIENTS:
        boundary = sys.modules.get(f"sftrace_otel.instrumentation.{name}")
        if boundary is not None:
            yield from boundary.patched()


def _frameworks() -> Iterable[Framework]:
    for name in _FRAMEWORKS:
        version = _version(name)
        if version is not None and name not in _BOUNDARIES:
            how = "decorate the functions with @trace_tool, below the framework's own decorator, or name them in "
            yield Framework(name=name, version=version, tools=f"{how}{PREFIX}TOOLS")


def _patterns(texts: Iterable[str]) -> Iterable[Pattern]:
    from sftrace_otel.analysis.toolnames import look_up

    for text in texts:
        found, problem = look_up(text, sys.path)
        yield Pattern(text=text, found=found, problem=problem)


def _unfollowed() -> Iterable[str]:
    """What this process could not trace everywhere; a boundary that was never loaded has followed nothing."""
    boundary = sys.modules.get("sftrace_otel.instrumentation.tools")
    if boundary is not None:
        yield from boundary.unfollowed()


def _recorded(folder: Path) -> Iterable[str]:
    """Obstacles that the newest bundles name, with the newest bundle that has each."""
    from sftrace_otel.bundle.read import list_bundles, open_bundle
    from sftrace_otel.errors import TraceStorageError

    said: dict[str, str] = {}
    try:
        newest = [one for one in list_bundles(folder) if one.status != "unreadable"][:_LOOKED_AT]
    except TraceStorageError:
        return
    for summary in newest:
        try:
            verdict = open_bundle(summary.path).run.get("verdict", {})
        except TraceStorageError:
            continue
        for obstacle in verdict.get("obstacles", ()):
            if obstacle.get("kind") in ("untraced_tool", "connection", "websocket"):
                said.setdefault(f"{obstacle.get('what')}; {obstacle.get('do')}", summary.path.name)
    for line, name in said.items():
        yield f"{line} (in {name})"


def _folder(path: Path) -> Folder:
    exists = path.is_dir()
    return Folder(path=str(path), exists=exists, problem=_unwritable(path if exists else _nearest(path)))


def _nearest(path: Path) -> Path:
    return next((parent for parent in path.absolute().parents if parent.exists()), Path(os.sep))


def _unwritable(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as fault:
        return f"{folder}: {fault.strerror}"


def _outside() -> Iterable[str]:
    for name, what in _OUTSIDE.items():
        version = _version(name)
        if version is not None:
            yield f"{name} {version}: {what}"


def _problems(
    environ: Mapping[str, str],
    settings: Settings,
    fault: str | None,
    requirements: Iterable[Requirement],
    libraries: Iterable[Library],
    folder: Folder,
) -> Iterable[str]:
    if fault is not None:
        yield f"nothing is recorded: {fault}"
    for need in requirements:
        if not need.fits:
            found = need.version or "is not installed"
            yield f"{need.name} {found}: {need.needs} is needed; pip install '{need.name}{need.needs}'"
    for library in libraries:
        if library.state == "unsupported":
            yield f"{library.name} {library.version} is outside {library.supported}: its calls may be missed"
    for pattern in _patterns(settings.tools):
        if pattern.problem is not None:
            yield f"{PREFIX}TOOLS: {pattern.text} names nothing: {pattern.problem}"
    if folder.problem is not None:
        yield f"bundles cannot be written: {folder.problem}; choose another folder with OTEL_SFTRACE_DIR"
    yield from _switched_off(environ, settings)


def _switched_off(environ: Mapping[str, str], settings: Settings) -> Iterable[str]:
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield "nothing is recorded: OTEL_SDK_DISABLED=true"
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        yield "nothing is recorded: OTEL_TRACES_EXPORTER=none"
    if settings.capture == "off":
        yield f"nothing is recorded: {PREFIX}CAPTURE=off"
    disabled = environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "")
    if "*" in disabled or "sftrace" in disabled:
        yield f"some or all of our boundaries are off: OTEL_PYTHON_DISABLED_INSTRUMENTATIONS={disabled}"
