"""The parts of `furrow bench hostile`: attacks, each with a proof that it took effect."""
