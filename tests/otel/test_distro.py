# SPDX-License-Identifier: Apache-2.0
"""The rules of the distro, one by one; `test_auto_instrumentation.py` runs them for real."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

import pytest
import wrapt
from opentelemetry.instrumentation.distro import BaseDistro
from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.sdk._configuration import _initialize_components, _OTelSDKConfigurator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator

import sftrace_otel.environment_variables as variables
from sftrace_otel.otel import distro
from sftrace_otel.otel.ids import SftraceIdGenerator
from sftrace_otel.settings import PREFIX, Settings

NOTHING: Callable[[str, str], bool] = lambda group, name: False  # noqa: E731
EVERYTHING: Callable[[str, str], bool] = lambda group, name: True  # noqa: E731
DEFAULTS = {
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
}


def only_http(group: str, name: str) -> bool:
    return name == "otlp_proto_http"


# --- entry points -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "kind"),
    [
        ("opentelemetry_traces_exporter", SpanExporter),
        ("opentelemetry_distro", BaseDistro),
        ("opentelemetry_configurator", _OTelSDKConfigurator),
        ("opentelemetry_instrumentor", BaseInstrumentor),
        ("opentelemetry_id_generator", IdGenerator),
    ],
)
def test_every_entry_point_loads_and_is_of_its_kind(group: str, kind: type) -> None:
    ours = [point for point in entry_points(group=group) if point.value.startswith("sftrace_otel")]
    assert ours
    for point in ours:
        assert issubclass(point.load(), kind)


def test_the_hook_and_the_variables_are_declared() -> None:
    [hook] = [point for point in entry_points(group="opentelemetry_pre_instrument") if point.name == "sftrace"]
    assert hook.load() is distro.pre_instrument
    [module] = [point for point in entry_points(group="opentelemetry_environment_variables") if point.name == "sftrace"]
    assert module.load() is variables


def test_no_instrumentor_asks_for_a_library() -> None:
    """The loader checks per distribution: one absent library would switch all of ours off."""
    from sftrace_otel.otel import instrumentors

    for kind in (instrumentors.HttpInstrumentor, instrumentors.OpenAIInstrumentor, instrumentors.ToolsInstrumentor):
        assert kind().instrumentation_dependencies() == ()


def test_each_setting_is_a_variable_and_so_a_flag() -> None:
    names = {name for name in vars(variables) if name.startswith("OTEL_")}
    assert names == {PREFIX + field.upper() for field in Settings.__dataclass_fields__}
    assert all(getattr(variables, name) == name for name in names)


def test_the_configurator_goes_by_the_sdks_own_signature() -> None:
    assert "id_generator" in inspect.signature(_initialize_components).parameters


# --- which distro -----------------------------------------------------------------------------------------------------


def test_the_distro_is_chosen_where_nobody_chose() -> None:
    environ: dict[str, str] = {"PATH": "x", "OTEL_SERVICE_NAME": "shop"}
    assert variables.choose_distro(environ)
    assert environ["OTEL_PYTHON_DISTRO"] == "sftrace"


@pytest.mark.parametrize(
    "name",
    ["OTEL_PYTHON_DISTRO", "OTEL_CONFIG_FILE", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_LOGS_EXPORTER"],
)
def test_a_choice_of_the_user_is_left_alone(name: str) -> None:
    environ = {name: "x"}
    assert not variables.choose_distro(environ)
    assert environ == {name: "x"}


def test_nothing_is_chosen_when_recording_is_off() -> None:
    assert not variables.choose_distro({"OTEL_SFTRACE_CAPTURE": "off"})


def test_importing_the_variables_in_a_program_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import os

    monkeypatch.setattr(sys, "argv", ["agent.py"])
    importlib.reload(variables)
    assert "OTEL_PYTHON_DISTRO" not in os.environ


@pytest.mark.parametrize(
    ("environ", "variable"),
    [
        ({}, None),
        ({"OTEL_TRACES_EXPORTER": "otlp,console"}, None),
        ({"OTEL_TRACES_EXPORTER": "none"}, "OTEL_TRACES_EXPORTER"),
        ({"OTEL_SDK_DISABLED": "TRUE"}, "OTEL_SDK_DISABLED"),
        ({"OTEL_SFTRACE_CAPTURE": "off"}, "OTEL_SFTRACE_CAPTURE"),
    ],
)
def test_when_recording_is_off(environ: dict[str, str], variable: str | None) -> None:
    assert distro.recording_off(environ) == variable


# --- defaults of another distro ---------------------------------------------------------------------------------------


def test_defaults_that_cannot_work_are_dropped_and_others_kept() -> None:
    environ = dict(DEFAULTS)
    distro.drop_missing_exporters(environ, set(), NOTHING)
    assert environ == {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
    environ = dict(DEFAULTS)
    distro.drop_missing_exporters(environ, set(), EVERYTHING)
    assert environ == DEFAULTS


def test_what_the_user_set_is_kept_even_if_it_cannot_work() -> None:
    environ = dict(DEFAULTS)
    distro.drop_missing_exporters(environ, {"OTEL_METRICS_EXPORTER"}, NOTHING)
    assert environ["OTEL_METRICS_EXPORTER"] == "otlp"
    assert "OTEL_TRACES_EXPORTER" not in environ


def test_a_protocol_of_one_signal_counts() -> None:
    environ = {**DEFAULTS, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    distro.drop_missing_exporters(environ, set(), only_http)
    assert "OTEL_TRACES_EXPORTER" in environ
    assert "OTEL_METRICS_EXPORTER" not in environ


@pytest.mark.parametrize(
    ("chosen", "protocol"),
    [
        ({"OTEL_TRACES_EXPORTER": "otlp"}, "http/protobuf"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, "http/protobuf"),
        ({"OTEL_TRACES_EXPORTER": "console"}, "grpc"),
        ({}, "grpc"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "otlp"}, "grpc"),
    ],
)
def test_http_is_used_where_otlp_is_wanted_and_only_http_is_installed(chosen: dict[str, str], protocol: str) -> None:
    environ = {**DEFAULTS, **chosen}
    distro.use_installed_protocol(environ, set(chosen), only_http)
    assert environ["OTEL_EXPORTER_OTLP_PROTOCOL"] == protocol


def test_grpc_stays_where_it_is_installed() -> None:
    environ = {**DEFAULTS}
    distro.use_installed_protocol(environ, {"OTEL_TRACES_EXPORTER"}, EVERYTHING)
    assert environ["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"


class OtherDistro(BaseDistro):  # type: ignore[misc]
    configured = 0
    loaded: list[str] = []  # noqa: RUF012

    def _configure(self, **kwargs: Any) -> None:
        type(self).configured += 1

    def load_instrumentor(self, entry_point: EntryPoint, **kwargs: Any) -> None:
        self.loaded.append(entry_point.name)


class FakePoint:
    """An entry point that needs no installed distribution."""

    def __init__(self, name: str, target: Any, value: str = "x:Y") -> None:
        self.name, self.value, self._target = name, value, target

    def load(self) -> Any:
        if isinstance(self._target, Exception):
            raise self._target
        return self._target


def test_another_distro_does_its_work(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    points = [FakePoint("broken", ImportError("x")), FakePoint("sftrace", object), FakePoint("theirs", OtherDistro)]
    monkeypatch.setattr(distro, "entry_points", lambda **kwargs: points)
    ours = distro.SftraceDistro()
    ours.configure()
    assert OtherDistro.configured == 1
    ours.load_instrumentor(FakePoint("flask", object))  # type: ignore[arg-type]
    assert OtherDistro.loaded == ["flask"]
    assert "broken" in caplog.text


# --- configurators ----------------------------------------------------------------------------------------------------


class Vendor(_OTelSDKConfigurator):
    calls: list[dict[str, Any]] = []  # noqa: RUF012

    def _configure(self, **kwargs: Any) -> None:
        self.calls.append(kwargs)


class Plain(_OTelSDKConfigurator):
    """As opentelemetry-distro's: nothing of its own."""


class TheirIds(RandomIdGenerator):
    """An id generator of the user's."""


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(_OTelSDKConfigurator, "_configure", lambda self, **kwargs: calls.append(kwargs))
    return calls


def test_a_vendors_configurator_is_run_instead(
    monkeypatch: pytest.MonkeyPatch, configured: list[dict[str, Any]]
) -> None:
    monkeypatch.setattr(distro, "entry_points", lambda **kwargs: [FakePoint("vendor", Vendor)])
    distro.SftraceConfigurator().configure(auto_instrumentation_version="1")
    assert Vendor.calls == [{"auto_instrumentation_version": "1"}]
    assert configured == []


@pytest.mark.parametrize("others", [[], [FakePoint("configurator", Plain)]])
def test_otherwise_the_sdks_own(
    monkeypatch: pytest.MonkeyPatch, configured: list[dict[str, Any]], others: list[FakePoint]
) -> None:
    monkeypatch.setattr(distro, "entry_points", lambda **kwargs: others)
    distro.SftraceConfigurator().configure(auto_instrumentation_version="1")
    monkeypatch.setenv("OTEL_CONFIG_FILE", "x.yaml")
    distro.SftraceConfigurator().configure(auto_instrumentation_version="1")
    assert configured == [{"auto_instrumentation_version": "1"}, {}]


@pytest.mark.parametrize(
    ("generator", "environ", "expected"),
    [
        (RandomIdGenerator(), {}, SftraceIdGenerator),
        (RandomIdGenerator(), {"OTEL_PYTHON_ID_GENERATOR": "random"}, RandomIdGenerator),
        (TheirIds(), {}, TheirIds),
    ],
)
def test_ids_are_ours_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch, generator: IdGenerator, environ: dict[str, str], expected: type
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    provider = TracerProvider(id_generator=generator, shutdown_on_exit=False)
    tracer = provider.get_tracer("made before")
    monkeypatch.setattr(distro.trace, "get_tracer_provider", lambda: provider)
    distro._own_ids()
    assert type(provider.id_generator) is expected
    assert type(tracer.id_generator) is expected  # type: ignore[attr-defined]


def test_the_loaders_untrue_warning_is_silenced_and_others_are_not(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("opentelemetry.instrumentation.auto_instrumentation._load")
    before = list(logger.filters)
    try:
        distro._silence_not_loaded()
        logger.warning("Configuration of %s not loaded, %s already loaded", "configurator", "sftrace")
        logger.warning("Configuration of %s not loaded, %s already loaded", "sftrace", "configurator")
        logger.warning("Configuration of %s not loaded, %s already loaded", "b", "a")
        logger.warning("Configuration of %s not loaded because %s is set by %s", "a", "b", "c")
    finally:
        logger.filters[:] = before
    assert caplog.messages[0] == "Configuration of b not loaded, a already loaded"
    assert caplog.messages[1:] == ["Configuration of a not loaded because b is set by c"]


# --- instrumentors that wait ------------------------------------------------------------------------------------------


def test_deferred_loading_runs_after_the_one_under_way() -> None:
    order: list[str] = []

    def first() -> None:
        order.append("first begins")
        sys.modules["sftrace_test_b"] = module = ModuleType("sftrace_test_b")
        wrapt.notify_module_loaded(module)
        order.append("first ends")

    distro._Deferred.on_import("sftrace_test_a", first)
    distro._Deferred.on_import("sftrace_test_b", lambda: order.append("second"))
    try:
        assert order == []
        sys.modules["sftrace_test_a"] = module = ModuleType("sftrace_test_a")
        wrapt.notify_module_loaded(module)
    finally:
        sys.modules.pop("sftrace_test_a", None)
        sys.modules.pop("sftrace_test_b", None)
    assert order == ["first begins", "first ends", "second"]


def test_an_instrumentation_that_fails_does_not_fail_the_import(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise RuntimeError("secret detail")

    distro._Deferred.on_import("json", broken)
    [line] = caplog.messages
    assert "RuntimeError" in line and "secret" not in line


def test_the_hook_never_raises(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(environ: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(distro, "recording_off", fail)
    distro.pre_instrument()
    [line] = caplog.messages
    assert "RuntimeError" in line and "secret" not in line
