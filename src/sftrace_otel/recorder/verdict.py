# SPDX-License-Identifier: Apache-2.0
"""The verdict of a run: does it replay offline, and if not, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from sftrace_otel.recorder.run import Run

__all__ = ["Obstacle", "obstacles_of", "untraced_tool"]

Obstacle: TypeAlias = dict[str, object]
"""`kind`, `what` it is, and what to `do` about it (formats/sidecars-v1.md, `run.json`)."""


def untraced_tool(name: str) -> Obstacle:
    """The obstacle that the tool `name` left no event."""
    return {
        "kind": "untraced_tool",
        "what": f"the result of {name} went back to the model, and no tool event holds it",
        "do": f"decorate {name} with @trace_tool or name it in OTEL_SFTRACE_TOOLS",
        "name": name,
    }


def obstacles_of(
    run: Run,
    connections: Sequence[Mapping[str, object]],
    programs: Sequence[Mapping[str, object]] = (),
    *,
    content: bool,
) -> list[Obstacle]:
    """What keeps a run from replaying offline. `connections` made and `programs` started outside every boundary;
    `content`: payloads were captured."""
    found = [untraced_tool(name) for name in run.answered.untraced()]
    for host, count in run.websockets.items():
        seen = "a websocket" if count == 1 else f"{count} websockets"
        found.append(
            {
                "kind": "websocket",
                "what": f"{seen} to {host} {'was' if count == 1 else 'were'} seen and {'is' if count == 1 else 'are'} "
                "not recorded",
                "do": "trace the function that talks over it as a tool",
                "host": host,
                "count": count,
            }
        )
    for connection in connections:
        if connection["library"] == "websockets" and connection["host"] in run.websockets:
            continue  # the same thing
        where = f"{connection['host']}:{connection['port']}"
        found.append(
            {
                "kind": "connection",
                "what": f"{connection['library']} connected to {where} outside every boundary",
                "do": "use httpx, httpx2, aiohttp or urllib3 (requests) for it, or trace the function that makes it "
                "as a tool",
            }
        )
    for program in programs:
        found.append(
            {
                "kind": "program",
                "what": f"{program['library']} started the program {program['program']} outside every boundary",
                "do": "trace the function that starts it as a tool, or replay with "
                f"OTEL_SFTRACE_REPLAY_ALLOW=exec:{program['program']}",
            }
        )
    if not content:
        found.append(
            {
                "kind": "no_content",
                "what": "payloads were not captured",
                "do": "record with OTEL_SFTRACE_CAPTURE=full",
            }
        )
    if run.open_calls > 0:
        found.append(
            {
                "kind": "open_calls",
                "what": f"{run.open_calls} calls had not ended when the run did",
                "do": "let them finish before the program ends",
            }
        )
    if run.losses:
        what = ", ".join(f"{name}: {count}" for name, count in sorted(run.losses.items()))
        found.append({"kind": "losses", "what": what, "do": "see the log lines of sftrace_otel"})
    return found
