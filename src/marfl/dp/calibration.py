"""How much noise every peer adds, so that the sum of all shares is the noise that σ promises.

The update (clipped to C) and the clipping indicator (b − ½, so that it moves by at most ½) are blurred together.
With N(0, z²C²) on the sum of updates and N(0, σ_b²) on the sum of indicators, one peer's contribution shifts the pair
by at most √(1/z² + 1/(2σ_b)²) = 1/σ standard deviations (Andrew et al. 2021, theorem 1). Where the bound is fixed
nothing is indicated, and z = σ. `lattice` makes integers of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from marfl.dp.accounting import Release
from marfl.errors import InputError


@dataclass(frozen=True)
class NoisePlan:
    """The noise of one iteration. Every number in it is public, and none depends on data."""

    noise_multiplier: float  # σ: what the update's and the indicator's noise are worth together
    peers: int  # n: the sealed roster, whose members cut the noise into n shares
    indicator_noise: float | None = None  # σ_b; None means the larger of n/20 and 1.5σ
    tolerated_loss: float = 0.0  # f: σ still holds when this part of the shares never arrives
    adaptive: bool = True  # the bound follows the indicators; else there are none
    published: bool = False  # by default σ_b is n/20, as in Algorithm 4 of MAR-FL
    colluders: int = 0  # peers that tell an observer their shares of noise
    sampling: float = 1.0  # q: the probability with which a record is in its peer's batch

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        if self.peers < 1:
            raise InputError(f"peers = {self.peers}: must be at least 1")
        check_tolerated_loss(self.tolerated_loss)
        if not 0 <= self.colluders < self.peers:
            raise InputError(f"colluders = {self.colluders}: must be at least 0 and below the {self.peers} shares")
        if self.adaptive and not self.noise_multiplier < 2 * self.indicator_deviation < math.inf:
            raise InputError(self._too_much_noise())

    @property
    def indicator_deviation(self) -> float:
        """σ_b: the standard deviation of the noise on the sum of the indicators."""
        if self.indicator_noise is not None:
            return self.indicator_noise
        usual = self.peers / 20  # Andrew et al. 2021
        return usual if self.published else max(usual, 1.5 * self.noise_multiplier)

    @property
    def update_multiplier(self) -> float:
        """z = (σ⁻² − (2σ_b)⁻²)^(−1/2): the noise multiplier of the sum of the clipped updates alone."""
        if not self.adaptive:
            return self.noise_multiplier
        return self.noise_multiplier / math.sqrt(1 - (self.noise_multiplier / (2 * self.indicator_deviation)) ** 2)

    @property
    def indicator_weight(self) -> float:
        """z/2σ_b: what an indicator of ±1 must be multiplied by to need as much noise as an update of norm 1."""
        return self.update_multiplier / (2 * self.indicator_deviation) if self.adaptive else 0.0

    def update_share(self, bound: float) -> float:
        """Standard deviation of one peer's noise on each coordinate: zC/√((1−f)n)."""
        return self.update_multiplier * bound / self._spread

    def noise_to_clip_ratio(self, parameters: int) -> float:
        """Norm of the mean update's noise over C: z√P/(n√(1−f)). A model learns while this is not far above 1."""
        return self.update_multiplier * math.sqrt(parameters / (1 - self.tolerated_loss)) / self.peers

    def release(self, arrived: int) -> Release:
        """The ledger's entry for an iteration whose published total holds `arrived` shares; 0 if it was abandoned."""
        return Release(self.noise_multiplier, self.peers, arrived, self.tolerated_loss, self.sampling, self.colluders)

    @property
    def survivors(self) -> float:
        """(1−f)n: when so many shares arrive, their variances add up to the whole."""
        return (1 - self.tolerated_loss) * self.peers

    @property
    def _spread(self) -> float:
        return math.sqrt(self.survivors)

    def _too_much_noise(self) -> str:
        if self.indicator_noise is not None:
            least = self.noise_multiplier / 2
            return f"indicator_noise = {self.indicator_noise:g}: must be a number above noise_multiplier/2 = {least:g}"
        least_peers = math.floor(10 * self.noise_multiplier) + 1
        return (
            f"noise_multiplier = {self.noise_multiplier:g} with {self.peers} peers: must be below peers/10 = "
            f"{self.peers / 10:g}; needs at least {least_peers} peers or an indicator_noise of its own"
        )


def least_arrived(peers: int, tolerated_loss: float) -> int:
    """The fewest shares for which σ still holds: (1−f)n, rounded up."""
    check_tolerated_loss(tolerated_loss)
    return math.ceil((1 - tolerated_loss) * peers - 1e-9)  # 0.3·10 is a little more than 3 in floating point


def check_tolerated_loss(tolerated_loss: float) -> None:
    """Refuse a loss that is no part of the whole, or all of it."""
    if not 0 <= tolerated_loss < 1:
        raise InputError(f"tolerated_loss = {tolerated_loss:g}: must be at least 0 and below 1")


def check_noise_multiplier(noise_multiplier: float) -> None:
    """Refuse a σ that is no noise at all, or none that a computer can draw."""
    if not 0 < noise_multiplier < 1e100:
        raise InputError(f"noise_multiplier = {noise_multiplier:g}: must be a number above 0, or nothing is private")
