"""`polytoken models`: what is here and what can be pulled."""

from __future__ import annotations

from polytoken.cli import options as flags
from polytoken.cli.output import write_json
from polytoken.cli.tables import Column, count_text, print_table, size_text


def models(*, json: flags.Json = False, store: flags.Store = None) -> None:
    """List the models of the catalogue and those converted from GGUF files."""
    records = flags.open_store(store).list()
    if json:
        write_json([record.as_json() for record in records])
        return
    columns = (Column("name"), Column("state"), Column("size", right=True), Column("quantisation"),
               Column("parameters", right=True), Column("source"), Column("note"))  # fmt: skip
    rows = [
        (record.name, record.state, size_text(record.bytes), record.quantisation or "none",
         count_text(record.parameters), record.source, record.note)
        for record in records
    ]  # fmt: skip
    print_table(columns, rows)
