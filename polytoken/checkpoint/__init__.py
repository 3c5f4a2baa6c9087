"""Checkpoints: from a name to a loaded model, and nothing that runs one.

`catalogue`, `fetch`, `store`: what can be pulled, how it is fetched and checked, where it lives. `gguf`,
`gguf_tokenizer`, `convert`: GGUF files to normal checkpoints. `resolve`: names to folders. `config`, `files`,
`quantisation`, `manifest`: what a folder says, read before any weight is. `load`, `tokenizer`, `runtime`: into memory.
`inspect`: a report from headers alone. `plain`: a packed checkpoint as a plain one, for other programs. (`resolve` and
`inspect` are not lifted up here, since they bear their modules' names.)
"""

from polytoken.checkpoint.catalogue import CATALOGUE, CatalogueEntry
from polytoken.checkpoint.progress import Progress
from polytoken.checkpoint.runtime import Runtime, load_runtime
from polytoken.checkpoint.store import CheckpointStore, StoredModel, default_cache_root
from polytoken.checkpoint.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "CATALOGUE",
    "CatalogueEntry",
    "CheckpointStore",
    "Progress",
    "Runtime",
    "StoredModel",
    "Tokenizer",
    "default_cache_root",
    "load_runtime",
    "load_tokenizer",
]
