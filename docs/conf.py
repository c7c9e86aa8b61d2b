# SPDX-License-Identifier: Apache-2.0
"""How the documentation is built: `make docs`. Why Sphinx: docs/adr/0001-documentation-generator.md."""

project = "sftrace-otel"
author = "the sftrace-otel developers"

extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings: list[str] = []

html_theme = "alabaster"
html_title = "sftrace-otel"
html_theme_options = {"description": "Record, replay and fork runs of AI agents", "page_width": "1100px"}
html_show_sourcelink = False
