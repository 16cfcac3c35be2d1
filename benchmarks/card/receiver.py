"""The other process of part 3: a server's end of a pipe, with weights of its own to write to.

    python -m benchmarks.card.receiver HOST PORT KIND DEVICE SHAPE

It prints one line of JSON for each publish: seconds, and the checksum of what it then holds.
"""

from __future__ import annotations

import json
import sys
import time

import torch

from benchmarks.card import bare

TIMEOUT_S = 60.0


def main(host: str, port: str, kind: str, device: str, fields: str) -> None:
    """Takes publishes until the sender has gone."""
    bare.import_settings()
    from treegraft.extras.memory.pipe import Pipe
    from treegraft.policy.tiny import build_random_model
    from treegraft.policy.weights import bit_sum, fingerprint_of, plain_weights

    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    with place:
        model = build_random_model(json.loads(fields), torch.bfloat16, 1).eval()
    own = plain_weights(model)
    pipe = Pipe(host, int(port), 1, 2, kind, TIMEOUT_S)
    pipe.meet()
    for line in sys.stdin:
        assert line.strip() == "receive"
        begun = time.perf_counter()
        sums = {}
        for name, tensor in pipe.receive(place):
            own[name].copy_(tensor)
            # Of what is here now, not of what has come.
            held = own[name]
            sums[name] = (str(held.dtype), tuple(held.shape), bit_sum(held))
        found = {name: (*facts, int(total)) for name, (*facts, total) in sums.items()}
        seconds = time.perf_counter() - begun
        said = {"fingerprint": fingerprint_of(found), "seconds": seconds}  # type: ignore[arg-type]
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
