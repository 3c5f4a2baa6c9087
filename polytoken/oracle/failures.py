"""How a run of the oracle can fail, with a name and an exit status: 2 usage, 3 mismatch, 4 non-finite, 86 canary."""

from __future__ import annotations

from typing import Final

from polytoken.errors import EXIT_MISMATCH, PolytokenError

EXIT_CANARY: Final = 86  # the device did not answer others in time


class MismatchError(PolytokenError):
    """Two things that must agree do not.

    Codes: `source_mismatch` (a source run), `snapshot_poisoned`, `commit_refused`, `no_natural_end`, `gate_failed`.
    """

    code = "mismatch"
    exit_status = EXIT_MISMATCH
