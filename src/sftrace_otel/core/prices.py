# SPDX-License-Identifier: Apache-2.0
"""What an LLM call cost, from a table of prices that the user gives.

Decision: exact decimal arithmetic on the numbers as they are written in the table; a price that is not there is never
guessed, and then the call has no cost. Rejected: a table of our own, which is wrong the day a provider changes a price.

The table is a JSON object: a model's name, or the beginning of names followed by `*`, to an object of prices in US
dollars per million tokens: `input`, `output`, and `cached_input` for the part of the input that came from the
provider's cache (without it, that part costs what `input` says).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Context, Decimal

from sftrace_otel.errors import SettingsError

__all__ = ["Prices"]

_PARTS = frozenset({"input", "output", "cached_input"})
_MILLION = Decimal(1_000_000)
_EXACT = Context(prec=100)
"""More digits than a sum of token counts times prices can have."""


class Prices:
    """A price table; empty unless read from a text."""

    def __init__(self, table: Mapping[str, Mapping[str, Decimal]] | None = None) -> None:
        table = table or {}
        self._exact = {model: prices for model, prices in table.items() if not model.endswith("*")}
        beginnings = [(model[:-1], prices) for model, prices in table.items() if model.endswith("*")]
        self._beginnings = sorted(beginnings, key=lambda pair: -len(pair[0]))

    def __bool__(self) -> bool:
        return bool(self._exact or self._beginnings)

    @classmethod
    def from_json(cls, text: str) -> Prices:
        """The table in a JSON text.

        Raises:
            SettingsError: What is wrong, and in which entry.
        """
        try:
            table = json.loads(text, parse_float=Decimal, parse_int=Decimal)
        except (ValueError, RecursionError):
            raise SettingsError("the price table is not JSON") from None
        if not isinstance(table, dict):
            raise SettingsError("the price table must be a JSON object")
        return cls({model: _entry(model, prices) for model, prices in table.items()})

    def of(self, model: str | None) -> Mapping[str, Decimal] | None:
        """The prices of a model: those of its name, else of the longest beginning of it."""
        if not model:
            return None
        found = self._exact.get(model)
        if found is None:
            found = next((prices for start, prices in self._beginnings if model.startswith(start)), None)
        return found

    def cost(
        self, models: tuple[str | None, ...], *, prompt: int | None, completion: int | None, cached: int | None = None
    ) -> Decimal | None:
        """US dollars of a call, by the first of `models` that has prices; None where a price or the usage is unknown.

        `cached` are those of the `prompt` tokens that came from the provider's cache.
        """
        prices = next((found for found in map(self.of, models) if found is not None), None)
        if prices is None or (prompt is None and completion is None):
            return None
        read = min(cached or 0, prompt or 0)
        parts = (("input", (prompt or 0) - read), ("cached_input", read), ("output", completion or 0))
        total = Decimal(0)
        for part, tokens in parts:
            if not tokens:
                continue
            price = prices.get(part, prices.get("input") if part == "cached_input" else None)
            if price is None:
                return None
            total = _EXACT.add(total, _EXACT.multiply(price, Decimal(tokens)))
        return _EXACT.divide(total, _MILLION)


def _entry(model: str, prices: object) -> dict[str, Decimal]:
    if not isinstance(prices, dict) or not prices:
        raise SettingsError(f"the prices of {model!r} must be an object with {', '.join(sorted(_PARTS))}")
    for part, price in prices.items():
        if part not in _PARTS:
            raise SettingsError(f"the prices of {model!r} have an unknown entry; known are {', '.join(sorted(_PARTS))}")
        if not isinstance(price, Decimal) or not price.is_finite() or price < 0:
            raise SettingsError(f"the price {part!r} of {model!r} must be a number, 0 or more")
    return dict(prices)
