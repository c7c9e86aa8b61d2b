# SPDX-License-Identifier: Apache-2.0
"""The quickstart's agent with its two tools in a module of their own and no trace of sftrace in the code.

They are named from outside instead:

    OTEL_SFTRACE_TOOLS=shop:find_order,shop:refund opentelemetry-instrument python agent.py
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI
from shop import find_order, refund

MODEL = "gpt-5-mini"
PROMPT = "You are the support agent of {shop}. Refunds are possible within {refund_days} days, in {currency}."
REQUEST = "Please refund my order A-1001, the lamp arrived broken."


def parameters(**properties: str) -> dict[str, Any]:
    """The JSON Schema of a tool whose arguments are all required."""
    return {
        "type": "object",
        "properties": {name: {"type": kind} for name, kind in properties.items()},
        "required": list(properties),
    }


TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "find_order", "parameters": parameters(order_id="string")}},
    {"type": "function", "function": {"name": "refund", "parameters": parameters(order_id="string", amount="number")}},
]


def work(client: OpenAI, messages: list[Any]) -> str:
    """The loop: ask the model, run the tools it asks for, until it answers in words."""
    order: dict[str, Any] = {}
    while True:
        message = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            arguments = json.loads(call.function.arguments)
            if call.function.name == "find_order":
                result = order = find_order(**arguments)
            else:
                # The amount comes from our order, not from the model. The bug: this field is in cents.
                arguments["amount"] = order["price_cents"]
                result = refund(**arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})


async def check(draft: str) -> list[str]:
    """Two opinions on the draft, asked for at the same time."""
    async with AsyncOpenAI() as client:

        async def ask(aspect: str) -> str:
            request = f"Check this reply, its {aspect} only:\n{draft}"
            answer = await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": request}])
            return answer.choices[0].message.content or ""

        return await asyncio.gather(ask("tone"), ask("facts"))


def stream(client: OpenAI, draft: str) -> str:
    """The final letter, printed as it comes."""
    request = f"Rewrite this as a letter:\n{draft}"
    words = []
    for chunk in client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": request}], stream=True
    ):
        words.append(chunk.choices[0].delta.content or "")
        print(words[-1], end="", flush=True)
    print()
    return "".join(words)


def main() -> dict[str, Any]:
    """Handle one request and return what was decided."""
    policy = httpx.get(os.environ["SHOP_URL"] + "/policy.json").raise_for_status().json()
    client = OpenAI()
    messages = [{"role": "system", "content": PROMPT.format(**policy)}, {"role": "user", "content": REQUEST}]
    draft = work(client, messages)
    checks = asyncio.run(check(draft))
    outcome = {"checks": checks, "letter": stream(client, draft)}
    print(json.dumps(outcome, indent=2))
    return outcome


if __name__ == "__main__":
    main()
