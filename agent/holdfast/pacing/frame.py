"""Where things are on a picture of an outlook's curve, as fractions from the left and from the bottom.

Shared by the terminal and the page, so that both draw the same picture.
"""

from __future__ import annotations

import math

from .outlook import Outlook

LEAST_SPAN = 0.01
"""Of the ETTR shown: a curve that is flat within a hundredth looks flat."""
_TIMES = [
    base * unit
    for unit, bases in (
        (1e-3, (1, 2, 5, 10, 20, 50, 100, 200, 500)),
        (1.0, (1, 2, 5, 10, 20, 30)),
        (60.0, (1, 2, 5, 10, 20, 30)),
        (3600.0, (1, 2, 5, 12)),
        (86400.0, (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)),
    )
    for base in bases
]


class Frame:
    def __init__(self, outlook: Outlook) -> None:
        self.low, self.high = outlook.curve[0].interval_seconds, outlook.curve[-1].interval_seconds
        best = outlook.best.effective or 0.0
        held = (outlook.present, *outlook.around, *outlook.asked, *outlook.policies)
        worst = min(
            (each.effective for each in held if each is not None and each.effective is not None), default=best
        )
        span = max((best - worst) * 1.3, LEAST_SPAN)
        self.top = min(1.0, best + span / 12)
        self.bottom = max(0.0, best - span)

    def x(self, seconds: float) -> float:
        """On a logarithmic scale; what is outside is at the edge."""
        if seconds <= self.low:
            return 0.0
        return min(1.0, math.log(seconds / self.low) / math.log(self.high / self.low))

    def y(self, effective: float) -> float:
        """Below 0 where the curve leaves the picture."""
        return (effective - self.bottom) / (self.top - self.bottom)

    def times(self, most: int) -> list[float]:
        """At most so many round times within the frame, about evenly apart."""
        inside = [time for time in _TIMES if self.low <= time <= self.high]
        if len(inside) <= most:
            return inside
        # Those next to even places, so that the labels keep their distance.
        places = [self.low * (self.high / self.low) ** ((n + 0.5) / most) for n in range(most)]
        return sorted({min(inside, key=lambda time: abs(math.log(time / place))) for place in places})

    def shares(self, most: int) -> list[float]:
        """At most so many round ETTRs within the frame."""
        span = self.top - self.bottom
        step = next(
            base * 10.0**power
            for power in range(-6, 1)
            for base in (1, 2, 5)
            if span / (base * 10.0**power) <= most
        )
        first = math.ceil(self.bottom / step - 1e-9)
        return [round(n * step, 9) for n in range(first, math.floor(self.top / step + 1e-9) + 1)]
