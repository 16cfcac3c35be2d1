"""Settings of the whole suite."""

from __future__ import annotations

import os
import signal
import tempfile

# One thread unless a test says otherwise: the models are tiny, and two threads that wait for each
# other on a busy machine take five times as long. Read by torch when it is imported, here and in
# the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of the suite, whoever runs it: all its processes know the runs that one of them has made.
os.environ["TREEGRAFT_TRUST_KEY"] = f"{tempfile.gettempdir()}/treegraft-tests-{os.getuid()}/key"

from hypothesis import settings

# trackio reads its folder when it is first imported, which TRL does too: never the user's own.
_trackio = tempfile.TemporaryDirectory(prefix="treegraft-trackio-")
os.environ["TRACKIO_DIR"] = _trackio.name

# How long an example takes is a matter of the machine's other work.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")

# A suite that a script starts with "&" inherits an ignored SIGINT, and so would the commands whose
# Ctrl-C is tested.
signal.signal(signal.SIGINT, signal.default_int_handler)
