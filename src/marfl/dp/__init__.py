"""Differential privacy for a peer's whole contribution, and what it is worth to three observers.

    calibration        how much noise every peer adds: σ, z, σ_b and the shares of it
    noise              where the noise comes from: the OS's entropy, or a derived stream in the simulator
    mechanism          the sound mechanism: clip, blur, settle (after Andrew et al. 2021)
    paper              Algorithm 4 of MAR-FL to the letter, for comparison only
    accounting         what was given away to whom, and the ε it comes to
    budget             before a run: what is refused, the noise for a target ε, and the report of `marfl privacy`
    ledger             during a run: what it has spent, the columns of its rows, and when its budget ends it
    private_agreement  the agreed state of a private run, and what a peer of it sends
    privacy_settings   from `[privacy]` in a config to the mechanism
"""
