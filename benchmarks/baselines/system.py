"""One network and one compressor, as Cupcake describes them: what Algorithm 5.1 plans for."""

from dataclasses import dataclass

import numpy as np

from resilient_run.comm.cupcake.fusion import Floats, GroupCosts
from resilient_run.comm.plan.curve import FREE, Curve


@dataclass(frozen=True, kw_only=True)
class System(GroupCosts):
    """Costs over the bytes of the gradients before compression.

    Attributes:
        compress: Encoding of one group, h; on the device that computes.
        communicate: Communication of one encoded group, g.
        decompress: Decoding of one group after its communication; on the device that computes.
        communicate_dense: Communication of one group that is not compressed.
    """

    compress: Curve
    communicate: Curve
    decompress: Curve = FREE
    communicate_dense: Curve | None = None

    def over(self, sizes_bytes: Floats, compressed: bool) -> Floats:
        """Return the costs of groups."""
        if compressed:
            return np.stack([curve(sizes_bytes) for curve in (self.compress, self.communicate, self.decompress)])
        assert self.communicate_dense is not None, "what dense groups cost is not known"
        free = np.zeros_like(sizes_bytes)
        return np.stack([free, self.communicate_dense(sizes_bytes), free])
