"""The columns of a step: numpy arrays with one entry for each of its tokens, read-only.

A token takes 4 bytes for its id, 2 for its origin and its mask, and 4 for each score that float32
holds exactly. As tuples of objects it took 200.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy.typing as npt

# numpy is imported by what makes arrays: settings and commands load without it.
Column: TypeAlias = "npt.NDArray[Any]"


class Origin(IntEnum):
    """Who wrote a token. Recorded where the token is appended, never inferred."""

    PROMPT = 0
    """The task's prompt."""
    POLICY = 1
    """Sampled by the policy being trained; the only origin that may carry loss."""
    TOOL = 2
    """A tool's result with the markup around it."""
    RETRIEVED = 3
    """A step of another agent, grafted from the Step-Trace Buffer."""
    FORCED = 4
    """Anything else that we append: scaffold, injected ends."""
    CONTEXT = 5
    """Earlier steps as a later one saw them: a call without its thought, a summary's prompt."""


def written_by(origins: Column, origin: Origin) -> Column:
    """Returns [tokens] True where this is the author."""
    # As a plain number: numpy looks for a protocol of arrays in each member of an enumeration.
    mask: Column = origins == int(origin)
    return mask


FILLERS = {
    "sampling_logprobs": 0.0,
    "entropies": 0.0,
    "old_logprobs": 0.0,
    "ratios": 1.0,
    "credit_factors": 1.0,
}
"""The columns of scores, with the value of a token that was not sampled."""
_TYPES = {
    "token_ids": ("i", "q"),
    "origins": ("b", "b"),
    "loss_mask": ("?", "?"),
    **dict.fromkeys(FILLERS, ("f", "d")),
}
"""The narrow and the wide type of each column, by numpy's characters: compared with those of an
array in a tenth of the time that names take."""


def pack_columns(step: Any) -> None:
    """Makes the columns of a new step read-only arrays, and checks them.

    Raises:
        ValueError: a column has another length than `token_ids`, or a token that the policy did not
            sample carries loss.
    """
    for name, (narrow, wide) in _TYPES.items():
        values = getattr(step, name)
        if values is None:
            continue
        column = packed(values, narrow, wide)
        if column is not values:
            object.__setattr__(step, name, column)
        if column.shape != (step.num_tokens,):
            raise ValueError(
                f"step '{step.id}': {name} has {len(column)} entries, token_ids has"
                f" {step.num_tokens}; each holds one entry per token of the step"
            )
    # Checked here and not in the learner alone: a user's part that builds steps must fail at the
    # step, not as a policy that slowly learns to imitate its tools.
    wrong = step.loss_mask > step.sampled_mask
    if wrong.any():
        position = int(wrong.argmax())
        raise ValueError(
            f"step '{step.id}', token {position}: loss on a token of origin"
            f" {Origin(step.origins[position]).name.lower()}; only tokens that the policy sampled"
            " may carry loss"
        )


def packed(values: Any, narrow: str, wide: str) -> Column:
    """Returns values as a read-only array, of the narrow type if that changes none of them, else of
    the wide one. A read-only array of the right type is returned as it is, without a copy."""
    import numpy as np

    found: Column = np.asarray(values, "?" if wide == "?" else None)
    is_ours = found is values and not found.flags.writeable
    if is_ours and found.dtype.char == narrow:
        return found
    if not found.size:
        # To numpy an empty list holds float64.
        found = found.astype(wide)
    # "same_kind": a float is no id, and None is no score; both raise.
    column: Column = found.astype(wide, casting="same_kind", copy=not is_ours)
    # A log-probability of float64 that float32 cannot hold would change by a save.
    if narrow != wide:
        with np.errstate(over="ignore"):
            short = column.astype(narrow)
        column = short if (short == column).all() else column
    column.flags.writeable = False
    return column


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values of a field are equal; arrays are if all their entries are."""
    import numpy as np

    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
