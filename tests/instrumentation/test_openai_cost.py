# SPDX-License-Identifier: Apache-2.0
"""What calls cost, by a table of prices: exact, never guessed, in the response's event and in the manifest."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import OpenAI

from sftrace_otel.core.prices import Prices
from sftrace_otel.errors import SettingsError

Run = Callable[..., Any]

pytestmark = [  # agents leave clients open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TABLE = """{
  "gpt-5*": {"input": 1.25, "cached_input": 0.125, "output": 10},
  "gpt-5-mini*": {"input": 0.25, "output": 2.00},
  "gpt-5-mini-exact": {"input": 1e-1},
  "free": {"input": 0, "output": 0}
}"""


@pytest.mark.parametrize(
    ("models", "prompt", "completion", "cached", "want"),
    [
        pytest.param(("gpt-5-2025",), 100, 20, 64, "0.000253", id="cached part"),
        pytest.param(("gpt-5-2025",), 100, 20, None, "0.000325", id="nothing cached"),
        pytest.param(("gpt-5-2025",), 10, 0, 64, "0.00000125", id="more cached than there is"),
        pytest.param(("gpt-5-mini-x",), 100, 20, 64, "0.000065", id="longest beginning, no price for the cached part"),
        pytest.param(("gpt-5-mini-exact",), 100, None, None, "0.00001", id="whole name first"),
        pytest.param(("gpt-5-mini-exact",), 100, 1, None, None, id="no price for the output"),
        pytest.param(("served-model", "gpt-5"), 100, 0, None, "0.000125", id="the model asked for"),
        pytest.param(("other", None), 100, 20, None, None, id="unknown model"),
        pytest.param(("gpt-5",), None, None, None, None, id="unknown usage"),
        pytest.param(("free",), 100, 20, None, "0", id="free"),
    ],
)
def test_the_cost_of_a_call(
    models: tuple[str | None, ...], prompt: int | None, completion: int | None, cached: int | None, want: str | None
) -> None:
    cost = Prices.from_json(TABLE).cost(models, prompt=prompt, completion=completion, cached=cached)
    assert cost == (None if want is None else Decimal(want))


@given(st.decimals(0, 1000, places=9), st.decimals(0, 1000, places=9), st.integers(0, 10**12), st.integers(0, 10**12))
def test_the_cost_is_exact(price: Decimal, other: Decimal, prompt: int, completion: int) -> None:
    prices = Prices.from_json(f'{{"m": {{"input": {price:f}, "output": {other:f}}}}}')
    cost = prices.cost(("m",), prompt=prompt, completion=completion)
    assert cost is not None
    assert Fraction(cost) == (Fraction(price) * prompt + Fraction(other) * completion) / 1_000_000


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "must be a JSON object"),
        ('{"m": {}}', "'m' must be an object"),
        ('{"m": 3}', "'m' must be an object"),
        ('{"m": {"inptu": 3}}', "unknown entry"),
        ('{"m": {"input": -1}}', "must be a number"),
        ('{"m": {"input": "1"}}', "must be a number"),
        ('{"m": {"input": true}}', "must be a number"),
        ('{"m": {"input": NaN}}', "must be a number"),
    ],
)
def test_a_table_that_is_wrong_says_where(text: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        Prices.from_json(text)


def asked(server: Any, *models: str) -> None:
    client = OpenAI(base_url=server.base_url, api_key="k", max_retries=0)
    for model in models:
        client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}])
        ask: Any = {"stream": True, "stream_options": {"include_usage": True}}
        list(client.chat.completions.create(model=model, messages=[{"role": "user", "content": "hi"}], **ask))
    client.close()


def costs(bundle: Any) -> list[float | None]:
    return [event.cost_usd for event in bundle.events if event.type == "llm_response"]


def test_events_and_manifest_say_what_was_spent(
    recorded: Run, openai_server: Any, read: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prices.json").write_text('{"gpt-5*": {"input": 0.1, "output": 0.2}}')
    monkeypatch.setenv("OTEL_SFTRACE_PRICES", str(tmp_path / "prices.json"))
    recorded(asked, openai_server, "gpt-5", "unknown", "gpt-5-mini")
    found = costs(read())
    usage = [(event.prompt_tokens, event.completion_tokens) for event in read().events if event.type == "llm_response"]
    want = [(Decimal("0.1") * prompt + Decimal("0.2") * completion) / 10**6 for prompt, completion in usage]
    assert found == [float(cost) for cost in want[:2]] + [None, None] + [float(cost) for cost in want[4:]]
    known = want[:2] + want[4:]
    assert read().manifest.totals.cost_usd == float(sum(known))


def test_without_a_table_nothing_has_a_cost(recorded: Run, openai_server: Any, read: Run) -> None:
    recorded(asked, openai_server, "gpt-5")
    assert costs(read()) == [None, None]
    assert read().manifest.totals.cost_usd is None


@pytest.mark.parametrize("content", [None, "{", json.dumps({"gpt-5": {"input": "secret-value"}})])
def test_a_table_that_cannot_be_used_is_one_line_and_no_cost(
    recorded: Run, openai_server: Any, read: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, content: str | None,
) -> None:  # fmt: skip
    if content is not None:
        (tmp_path / "prices.json").write_text(content)
    monkeypatch.setenv("OTEL_SFTRACE_PRICES", str(tmp_path / "prices.json"))
    with caplog.at_level(logging.WARNING, logger="sftrace_otel"):
        recorded(asked, openai_server, "gpt-5")
    assert costs(read()) == [None, None]
    [line] = [entry.getMessage() for entry in caplog.records]
    assert line.startswith("OTEL_SFTRACE_PRICES=")
    assert "secret-value" not in line
