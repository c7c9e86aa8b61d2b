# SPDX-License-Identifier: Apache-2.0
"""``python -m sftrace_otel VERB …``, the same as the script ``sftrace``."""

import sys

from sftrace_otel.cli.app import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
