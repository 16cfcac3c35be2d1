"""Notes of a pruned buffer, beside its traces: each trajectory's steps with their likelihoods, and
the cut ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from studies.pruning import judging

TABLE = """
CREATE TABLE IF NOT EXISTS prunings (
    source TEXT NOT NULL, task_id TEXT NOT NULL, trajectory TEXT NOT NULL, note TEXT NOT NULL,
    PRIMARY KEY (source, task_id, trajectory)
) WITHOUT ROWID
"""


def add_notes(file: judging.TraceFile, notes: Mapping[judging.Place, Mapping[str, Any]]) -> None:
    """Notes what became of trajectories; a note that is there already is replaced."""
    # Escaped: stored text may hold lone surrogates, which exist in no encoding.
    rows = [(*place, json.dumps(note)) for place, note in notes.items()]
    with file.transaction() as connection:
        connection.execute(TABLE)
        connection.executemany("INSERT OR REPLACE INTO prunings VALUES (?, ?, ?, ?)", rows)


def read_notes(file: judging.TraceFile) -> dict[judging.Place, dict[str, Any]]:
    """Returns the notes by trajectory; none for a buffer that was not pruned."""
    if not file.query("SELECT 1 FROM sqlite_master WHERE name = 'prunings'"):
        return {}
    rows = file.query("SELECT * FROM prunings")
    return {(source, task, name): json.loads(note) for source, task, name, note in rows}
