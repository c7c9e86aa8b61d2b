# SPDX-License-Identifier: Apache-2.0
"""The command line: one file per verb, arguments, printing and exit codes; no logic.

Decision: argparse, and every import a verb needs inside the verb, so that `--help` costs little more than bare Python.
Rejected: click and typer (two and five times the start-up), and a registry of plug-in verbs (the list is short and
closed). `TYPE_CHECKING` is a plain False here: type checkers know the name, and importing typing for it would cost a
third of an empty interpreter's start.
"""
