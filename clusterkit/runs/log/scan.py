"""Parse blocks of a log into its history; blocks may begin and end anywhere."""

from __future__ import annotations

from typing import Any

from clusterkit.runs.log import areal, ours
from clusterkit.runs.log.lines import interesting, messages, plain
from clusterkit.runs.log.metrics import Record
from clusterkit.runs.log.progress import LogHistory

LONGEST_LINE = 1 << 20
"""Only so many bytes of a line are parsed; no message is longer."""

TABLE_LINES = 1000
"""A table's rows come within so many lines after its head; other processes may print in between."""

_ROW, _END = "│".encode(), "╘".encode()


class LogScanner:
    """Reads a log as blocks of bytes and keeps its history. An incomplete line waits for the next block."""

    def __init__(self, history: LogHistory | None = None) -> None:
        self.history = history or LogHistory()
        self._line = b""
        self._skipping = False  # within a line that is too long
        self._table: dict[str, Any] | None = None  # whose rows are being gathered

    def forget_waiting(self) -> int:
        """Drop the last line if it is incomplete; return how many bytes must be fed again."""
        waiting, self._line = len(self._line), b""
        return waiting

    def feed(self, block: bytes) -> None:
        """Read the next block."""
        if self._skipping:
            start = block.find(b"\n") + 1
            if not start:
                return
            block, self._skipping = block[start:], False
        data = self._line + block if self._line else block
        end = data.rfind(b"\n", len(self._line)) + 1
        self._line = data[end:]
        if len(self._line) > LONGEST_LINE:
            self._take(self._line[:LONGEST_LINE])
            self._line, self._skipping = b"", True
        self._whole_lines(data, end)

    def _whole_lines(self, data: bytes, end: int) -> None:
        position = self._rows(data, 0, end)
        for hit in interesting(data, end):
            if hit < position:
                continue
            start = max(data.rfind(b"\n", position, hit) + 1, position)
            stop = data.find(b"\n", hit)
            self._take(data[start:stop])
            position = self._rows(data, stop + 1, end)

    def _rows(self, data: bytes, position: int, end: int) -> int:
        """Read rows of the table whose head was seen, if any; return the position behind them."""
        while self._table is not None and position < end:
            stop = data.find(b"\n", position)
            line = data[position:stop]
            position = stop + 1
            self._table["lines"] -= 1
            if _ROW in line:
                self._table["values"].update(areal.table_values(plain(line[:LONGEST_LINE])))
            else:
                self._take(line)
                if _END in line or (self._table is not None and self._table["lines"] <= 0):
                    self._end_table()
        return position

    def _take(self, line: bytes) -> None:
        for message in messages(plain(line)):
            record = areal.parse(message) or ours.parse(message)
            if record is None:
                continue
            if record["kind"] in ("table", "step"):
                self._end_table()
            if record["kind"] == "table":
                self._table = {**record, "values": {}, "lines": TABLE_LINES}
            else:
                self.history.take(record)

    def _end_table(self) -> None:
        table, self._table = self._table, None
        if table is not None and table["values"]:
            record: Record = {name: table[name] for name in ("time", "part", "parts", "dialect")}
            self.history.take({**record, "kind": "stats", "values": areal.canonical(table["values"])})

    # -- between invocations ----------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for JSON, without the incomplete line, which must be fed again."""
        return {"skipping": self._skipping, "table": self._table, "history": self.history.state()}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> LogScanner:
        """Restore a scanner from its state.

        Raises:
            ValueError, KeyError, TypeError: the state is damaged or of another version.
        """
        scanner = cls(LogHistory.restored(state["history"]))
        scanner._skipping, scanner._table = state["skipping"], state["table"]
        return scanner
