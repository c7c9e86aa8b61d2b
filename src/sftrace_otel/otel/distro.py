# SPDX-License-Identifier: Apache-2.0
"""What `opentelemetry-instrument` finds: distro, configurator, and a hook that works also where neither was chosen.

The loader takes the first distro and the first configurator that it meets, in the order of a directory listing. So:

* `SftraceDistro` and `SftraceConfigurator` let the other ones that are installed do their work first, and add to it.
  With `opentelemetry-distro` that keeps its defaults (OTLP), but for exporters that are not installed: the SDK's start
  would fail on them, and with it everything.
* `pre_instrument`, which the loader calls after whichever configurator it took, adds our span processor and the sampler
  to the provider that is there. It is the only place that does, so the order does not matter.
* The standard HTTP instrumentors import httpx and httpx2 when they are loaded; ours waits until the program does.

Recording stays off with `OTEL_TRACES_EXPORTER=none`, `OTEL_SDK_DISABLED=true` and `OTEL_SFTRACE_CAPTURE=off`.
Rejected: our processor through the configurator's `span_processors` (lost when another configurator wins), and
`OTEL_*_EXPORTER=none` for what is not installed (children inherit it and would take it for the user's wish).

Source: `facts/otel.md` §1.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any, ClassVar, NoReturn

import wrapt
from opentelemetry import trace
from opentelemetry.instrumentation.distro import BaseDistro  # type: ignore[attr-defined]
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.util._importlib_metadata import entry_points

from sftrace_otel import recorder as recording
from sftrace_otel.errors import SftraceError
from sftrace_otel.instrumentation import replaying
from sftrace_otel.otel.ids import SftraceIdGenerator
from sftrace_otel.otel.instrumentors import HttpInstrumentor
from sftrace_otel.otel.opening import read_settings, sdk_disabled
from sftrace_otel.otel.provider import attach, watch
from sftrace_otel.settings import Settings

try:
    from opentelemetry.sdk._configuration import _OTelSDKConfigurator
except ImportError:  # a private module: where it is gone, `pre_instrument` still sets a provider up
    _OTelSDKConfigurator = None  # type: ignore[assignment, misc]

__all__ = ["SftraceConfigurator", "SftraceDistro", "pre_instrument", "recording_off"]

_log = logging.getLogger("sftrace_otel")
_EXPORTERS = {
    "OTEL_TRACES_EXPORTER": ("opentelemetry_traces_exporter", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
    "OTEL_METRICS_EXPORTER": ("opentelemetry_metrics_exporter", "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL"),
    "OTEL_LOGS_EXPORTER": ("opentelemetry_logs_exporter", "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL"),
}
_PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_OTLP = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http", "http/json": "otlp_json_http"}
_OURS = "sftrace"


def recording_off(environ: Mapping[str, str]) -> str | None:
    """The variable that says that this process must not be recorded, None if none does."""
    if sdk_disabled(environ):
        return "OTEL_SDK_DISABLED"
    if environ.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return "OTEL_TRACES_EXPORTER"
    if environ.get("OTEL_SFTRACE_CAPTURE", "").strip().lower() == "off":
        return "OTEL_SFTRACE_CAPTURE"
    return None


# --- distro -----------------------------------------------------------------------------------------------------------


class SftraceDistro(BaseDistro):  # type: ignore[misc]
    """Runs the distro that would have been chosen without us, and loads HTTP instrumentors when they are needed."""

    def __init__(self) -> None:
        self.other = _other_distro()

    def _configure(self, **kwargs: Any) -> None:
        _silence_not_loaded()
        if _replay_wanted():
            _start_replay()  # first, so that no failure of another's set-up lets the program run for real
        if self.other is None:
            return
        chosen = {name for name in os.environ if name.startswith("OTEL_")}
        self.other.configure(**kwargs)
        use_installed_protocol(os.environ, chosen, _is_installed)
        drop_missing_exporters(os.environ, chosen, _is_installed)

    def load_instrumentor(self, entry_point: EntryPoint, **kwargs: Any) -> None:
        """Activate an instrumentor; those of httpx and httpx2 once the program imports the library."""
        if entry_point.value.startswith("opentelemetry.instrumentation.httpx:"):
            _http_boundary_first()
            _Deferred.on_import(entry_point.name, lambda: self._load_now(entry_point, **kwargs))
        else:
            self._load_now(entry_point, **kwargs)

    def _load_now(self, entry_point: EntryPoint, **kwargs: Any) -> None:
        if self.other is not None:
            self.other.load_instrumentor(entry_point, **kwargs)
        else:
            super().load_instrumentor(entry_point, **kwargs)


def use_installed_protocol(
    environ: MutableMapping[str, str], chosen: set[str], is_installed: Callable[[str, str], bool]
) -> None:
    """Where the user asks for OTLP without a protocol and only the HTTP exporter is installed, take that.

    `opentelemetry-distro` sets gRPC by default; without its exporter the SDK's start would fail.
    """
    wanted = any(name.endswith("_ENDPOINT") and name.startswith("OTEL_EXPORTER_OTLP") for name in chosen)
    wanted = wanted or any(environ.get(name, "").strip() == "otlp" for name in chosen.intersection(_EXPORTERS))
    group = "opentelemetry_traces_exporter"
    if not wanted or any(name.endswith("_PROTOCOL") for name in chosen) or is_installed(group, _OTLP["grpc"]):
        return
    if is_installed(group, _OTLP["http/protobuf"]):
        environ[_PROTOCOL] = "http/protobuf"


def drop_missing_exporters(
    environ: MutableMapping[str, str], chosen: set[str], is_installed: Callable[[str, str], bool]
) -> None:
    """Take away exporters that a distro set by default and that are not installed.

    `chosen`: variables that the user set, which stay as they are. `is_installed(group, name)` looks for an entry point.
    """
    for variable, (group, protocol_variable) in _EXPORTERS.items():
        value = environ.get(variable)
        if value is None or variable in chosen:
            continue
        protocol = environ.get(protocol_variable) or environ.get(_PROTOCOL) or "grpc"
        names = [_OTLP.get(protocol, name) if name == "otlp" else name for name in map(str.strip, value.split(","))]
        if not all(is_installed(group, name) for name in names):
            del environ[variable]


def _is_installed(group: str, name: str) -> bool:
    return any(True for _ in entry_points(group=group, name=name))


def _other_distro() -> Any:
    """The distro that the loader would take without ours, None if there is none that works."""
    for entry_point in entry_points(group="opentelemetry_distro"):
        if entry_point.name == _OURS:
            continue
        try:
            distro = entry_point.load()()
        except Exception as error:
            _log.warning("sftrace: the distro %s cannot be loaded (%s)", entry_point.name, type(error).__name__)
            continue
        if isinstance(distro, BaseDistro):
            return distro
    return None


def _silence_not_loaded() -> None:
    """The loader warns of a configurator that it did not take; ours does nothing that `pre_instrument` does not."""

    def of_others(record: logging.LogRecord) -> bool:
        not_loaded = str(record.msg).startswith("Configuration of %s not loaded, %s already loaded")
        return not (not_loaded and isinstance(record.args, tuple) and _OURS in record.args)

    logging.getLogger("opentelemetry.instrumentation.auto_instrumentation._load").addFilter(of_others)


def _http_boundary_first() -> None:
    # Wrappers nest in the order of their hooks: ours must be the inner one, to see the span of the standard one.
    if "sftrace_http" not in _disabled_instrumentations():
        HttpInstrumentor().instrument(skip_dep_check=True)


def _disabled_instrumentations() -> set[str]:
    names = os.environ.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "")
    return {name.strip() for name in names.split(",")}


class _Deferred:
    """Instrumentors that wait for an import.

    One module instruments httpx and httpx2 and imports both, so the import of one, under way in a hook, can set off the
    hook of the other before that module is complete: it is run after.
    """

    _running: ClassVar[bool] = False
    _ready: ClassVar[list[Callable[[], None]]] = []

    @classmethod
    def on_import(cls, module: str, load: Callable[[], None]) -> None:
        def hook(_: ModuleType) -> None:
            cls._ready.append(load)
            cls._run()

        wrapt.register_post_import_hook(hook, module)

    @classmethod
    def _run(cls) -> None:
        if cls._running:
            return
        cls._running = True
        try:
            while cls._ready:
                load = cls._ready.pop(0)
                try:
                    load()
                except Exception as error:  # the program's import must not fail because of telemetry
                    _log.warning("sftrace: an HTTP instrumentation could not be loaded (%s)", type(error).__name__)
        finally:
            cls._running = False


# --- configurator -----------------------------------------------------------------------------------------------------


class SftraceConfigurator(_OTelSDKConfigurator or object):  # type: ignore[misc]
    """Sets the SDK up as the other configurator that is installed does, else as the SDK's own."""

    def configure(self, **kwargs: Any) -> None:
        """Configure the SDK. Raises what the configurator that does the work raises."""
        other = _other_configurator()
        if other is not None and _has_own_way(type(other)):
            other.configure(**kwargs)
        elif _OTelSDKConfigurator is not None:
            self._configure(**({} if os.environ.get("OTEL_CONFIG_FILE") else kwargs))


def _other_configurator() -> Any:
    for entry_point in entry_points(group="opentelemetry_configurator"):
        if entry_point.name != _OURS:
            return entry_point.load()()
    return None


def _has_own_way(kind: type) -> bool:
    """Whether a configurator does more than the SDK's."""
    base = _OTelSDKConfigurator
    return base is None or not issubclass(kind, base) or kind._configure is not base._configure


# --- the hook ---------------------------------------------------------------------------------------------------------


def pre_instrument() -> None:
    """Called by the loader once the SDK is set up, whoever did it: record this process, or replay. Never raises."""
    try:
        if _replay_wanted():
            _start_replay()
            _own_ids()
            recording.restart_lineage()  # what was set up until now is none of the program's doing
        elif recording_off(os.environ) is None and read_settings({}) is not None:
            if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
                trace.set_tracer_provider(TracerProvider())  # no configurator ran, and spans need a provider
            _own_ids()
            attach()
            watch()
            recorder = recording.active()
            if recorder is not None:
                recorder.propagate = True
    except Exception as error:
        _log.error("sftrace: this process is not recorded (%s)", type(error).__name__)


def _own_ids() -> None:
    """Ids that leave the program's `random` alone, for the provider that is there, unless a generator was chosen."""
    provider = trace.get_tracer_provider()
    if (
        os.environ.get("OTEL_PYTHON_ID_GENERATOR")
        or type(getattr(provider, "id_generator", None)) is not RandomIdGenerator
    ):
        return
    provider.id_generator = ids = SftraceIdGenerator()  # type: ignore[attr-defined]
    for tracer in list(getattr(provider, "_tracers", {}).values()):
        tracer.id_generator = ids


def _replay_wanted() -> bool:
    return bool(os.environ.get("OTEL_SFTRACE_REPLAY", "").strip())


def _start_replay() -> None:
    """Replay for the rest of this process, or end it here with exit code 2.

    Replay fails closed: what calls us swallows exceptions, and a program that ran on would make its calls for real.
    """
    if replaying.active() is not None:
        _refuse_production()
        return
    try:
        settings = Settings.from_environ(os.environ)
        # By name: the replay stands above this room, and only a process that replays needs it.
        importlib.import_module("sftrace_otel.replay").activate_from_settings(settings)
    except BaseException as error:
        _refused(error)


def _refuse_production() -> None:
    """End this process where the provider, which is there only now, is one of production and nobody forced the replay.

    Detectors and configuration files name the environment too.
    """
    try:
        importlib.import_module("sftrace_otel.replay").refuse_production_of(trace.get_tracer_provider())
    except BaseException as error:
        _refused(error)


def _refused(error: BaseException) -> NoReturn:
    why = str(error) if isinstance(error, SftraceError) else type(error).__name__
    sys.stderr.write(f"sftrace: replay refused: {why}\n")
    sys.stderr.flush()
    os._exit(2)
