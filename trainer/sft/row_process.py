"""`python -m trainer.sft.row_process FD`: makes rows of examples until its pipe is closed.

It is given the configuration and the tokenizer, then parts of steps (`trainer.sft.rows.Part`), and gives back what it
made of each, or the exception.
"""

from __future__ import annotations

import pickle
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection

from trainer.sft.encoding import Encoder
from trainer.sft.rows import Encoded, make


def main() -> None:
    """Entry point."""
    pipe = Connection(int(sys.argv[1]))
    encoder: Encoder | None = None
    with suppress(EOFError, OSError):  # the trainer has ended: nobody wants what is under way
        while True:
            data = pipe.recv_bytes()
            found: Encoded | Exception | None = None
            try:
                told = pickle.loads(data)
                if encoder is None:
                    encoder = Encoder(*told)
                else:
                    found = make(encoder, told)
                    for row in found.rows:
                        row.ids  # noqa: B018 (made once, here)
            except Exception as error:
                error.add_note(traceback.format_exc())  # where it was raised
                found = error
            pipe.send_bytes(_pickled(found))


def _pickled(found: Encoded | Exception | None) -> bytes:
    """As bytes; an exception that cannot be sent becomes one that says the same."""
    if isinstance(found, Exception):
        try:
            pickle.loads(pickle.dumps(found))
        except Exception:
            found = RuntimeError("".join(traceback.format_exception(found)))
    return pickle.dumps(found)


if __name__ == "__main__":
    main()
