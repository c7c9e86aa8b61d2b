# SPDX-License-Identifier: Apache-2.0
"""The only room that opens bundle files: reading, atomic writing, the journal of an open run."""
