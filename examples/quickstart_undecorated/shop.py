# SPDX-License-Identifier: Apache-2.0
"""The shop's two functions that the agent offers to the model as tools."""

from __future__ import annotations

from typing import Any

ORDERS = {"A-1001": {"item": "desk lamp", "price": 49.90, "price_cents": 4990, "customer": "ada@example.com"}}


def find_order(order_id: str) -> dict[str, Any]:
    """The order, as the shop's database has it."""
    return {"order_id": order_id, **ORDERS[order_id]}


def refund(order_id: str, amount: float) -> dict[str, Any]:
    """Give money back; `amount` is in euros."""
    return {"order_id": order_id, "refunded": amount, "currency": "EUR"}
