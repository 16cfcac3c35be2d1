"""RAPO: rollouts into which steps of other agents are grafted."""

from __future__ import annotations

from treegraft.core.keyed import keyed_unit
from treegraft.core.types import Generate, Graft, PathView
from treegraft.explore.independent import Independent
from treegraft.settings.explore import GraftSettings


class HybridRollout(Independent):
    """Opens all leaves at the root; the later ones may retrieve.

    Source: Algorithm 1 of RAPO (arXiv 2603.03078, sec. 4.1). The first step is the agent's own, and
    so is the one after a graft; before every other step of a hybrid rollout a coin is tossed. A
    hybrid rollout that never retrieves is an ordinary one. The paper's eq. 4 taken alone would let
    one graft follow another; Algorithm 1 does not.

    Together with other explorers the starts may be fewer than the leaves: then the same share of
    each `num_starts` of them is hybrid, the last ones, and a branch is hybrid where its start is.
    Where starts are opened in stages the hybrid ones are spread evenly, so that each stage has its
    share.
    """

    def __init__(
        self,
        settings: GraftSettings,
        *,
        num_leaves: int,
        num_starts: int | None = None,
        is_spread: bool = False,
    ) -> None:
        """Takes RAPO's N_hybrid, of `num_leaves`, and the probability from the settings.

        Args:
            num_starts: first-level rollouts that are opened at once; None means all leaves.
            is_spread: starts are opened in stages.
        """
        self._num_starts = num_starts or num_leaves
        self._is_spread = is_spread
        num_hybrid = settings.num_hybrid
        # Rounded half up, and at least one where any is asked for.
        share = (2 * self._num_starts * num_hybrid + num_leaves) // (2 * num_leaves)
        self._num_hybrid = max(share, min(num_hybrid, 1))
        self._probability = settings.probability
        self._whole = settings.unit == "trajectory"

    def is_hybrid(self, start: int) -> bool:
        """Returns whether the rollouts of this first-level ordinal may retrieve."""
        # Modulo, so that starts that fill up later are hybrid in the same share.
        num = self._num_starts
        place = start % num
        if self._is_spread:
            return (place + 1) * self._num_hybrid // num > place * self._num_hybrid // num
        return place >= num - self._num_hybrid

    def before_step(self, path: PathView) -> Generate | Graft:
        """Returns Graft for a hybrid path whose coin says so."""
        # The rest of a trajectory is grafted once: the second would begin where the first ended.
        if not self.is_hybrid(path.start) or (self._whole and path.num_grafts):
            return Generate()
        # By the step's key, so that the coin is the same in a resumed run.
        heads = keyed_unit(*path.noise_key, "graft") < self._probability
        return Graft(whole=self._whole) if heads else Generate()
